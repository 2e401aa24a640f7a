"""Starts the training subprocesses of both sides, one at a time, and runs a benchmark script's command.

The parent imports no torch: each run has a fresh process, so no run inherits another's memory or warm allocator.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from training_job import Job, Measured
from typer.core import TyperCommand

from speculators.errors import UserError
from speculators.schema import Strict, write_json

_HERE = Path(__file__).parent


def export_rows(job: Job, threads: int | None = None) -> None:
    """Fill the job's `rows` directory.

    Raises:
        UserError: the subprocess failed; the end of what it said.
    """
    _start([sys.executable, str(_HERE / "own_driver.py"), "export"], job, None, threads)


def run_ours(job: Job, threads: int | None = None) -> Measured:
    """Train with `speculators.training`. Raises as `export_rows`."""
    return _measured([sys.executable, str(_HERE / "own_driver.py"), "train"], job, threads)


def run_upstream(python: Path, job: Job, threads: int | None = None) -> Measured:
    """Train with upstream's trainer in its own interpreter. Raises as `export_rows`."""
    return _measured([str(python), str(_HERE / "upstream_driver.py")], job, threads)


def run_script(name: str, command: TyperCommand) -> NoReturn:
    """Run a script's command with the exit codes of `speculators`: 0 done, 2 the user can fix it, 130 interrupted."""
    try:
        with command.make_context(name, sys.argv[1:]) as context:
            command.invoke(context)
        sys.exit(0)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except typer.TyperException as error:
        print(f"Error: {name}: {error.format_message()}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def deliver(result: Strict, output: Path | None, as_json: bool) -> Console | None:
    """Write the result and print it as JSON, where that is asked for.

    Returns:
        The console to show it on, None when it was printed as JSON.
    """
    if output:
        write_json(output, result)
    if as_json:
        print(result.model_dump_json(indent=2))
        return None
    return Console(width=150, highlight=False)


def _measured(command: list[str], job: Job, threads: int | None) -> Measured:
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        _start(command, job, result, threads)
        return Measured.model_validate_json(result.read_text(encoding="utf-8"))


def _start(command: list[str], job: Job, result: Path | None, threads: int | None) -> None:
    # PYTHONPATH could put our package in front of upstream's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_HUB_OFFLINE"] = "1"
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(job.model_dump_json())
        file.flush()
        whole = [*command, file.name, *([str(result)] if result else [])]
        done = subprocess.run(whole, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"{Path(command[1]).name}: {job.algorithm} ended with {done.returncode}: {said}")

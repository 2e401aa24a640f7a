"""What `speculators serve` adds to the start of `vllm serve`, and how long `--dry-run` takes.

    python benchmarks/serve_startup.py MODEL [MODEL ...] [--rounds 10] [--output startup.json]

A stand-in for vLLM notes when it is entered, and ends. It is started directly and by us, in alternating order; added is
the difference within a round. The trap: seconds on the clock are those of a quiet machine only, so processor seconds of
the whole process tree are told beside them (ours include finding out that vLLM has ended).
"""

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

from serve.spec import free_port
from speculators.provenance import Provenance
from speculators.schema import Strict, write_json

_MAIN = """
import os, time

def main():
    with open(os.environ["ENTERED"], "w") as file:
        file.write(repr(time.monotonic()))
    return 0
"""
_DIRECT = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
KINDS = ("direct", "serve", "dry-run")


class Timing(NamedTuple):
    """Seconds from the start until vLLM is entered (`--dry-run`: until the end), and processor seconds to the end."""

    wall_s: float
    cpu_s: float


class Run(Strict):
    """One start of one kind."""

    model: str
    kind: str
    round: int
    wall_s: float
    cpu_s: float


class Result(Strict):
    """What `--output` holds."""

    runs: tuple[Run, ...]
    provenance: Provenance


def stand_in(path: Path) -> Path:
    """A virtual environment with a `vllm` that only notes when it is entered."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(path)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)}))
    metadata = packages / "vllm-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    cli = packages / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    (cli / "main.py").write_text(_MAIN)
    return path


def time_start(kind: str, model: str, environment: Path, entered: Path) -> Timing:
    """Start once, to the end.

    Raises:
        SystemExit: it failed; its own words are shown.
    """
    port = str(free_port())
    ours = [sys.executable, "-m", "speculators", "serve", model, "--port", port, "--vllm", str(environment)]
    commands = {
        "direct": [str(environment / "bin" / "python"), "-c", _DIRECT, "serve", model, "--port", port],
        "serve": ours,
        "dry-run": [*ours, "--dry-run"],
    }
    entered.unlink(missing_ok=True)
    with tempfile.TemporaryFile() as said:
        began = time.monotonic()
        process = subprocess.Popen(
            commands[kind], env={**os.environ, "ENTERED": str(entered)}, stdout=said, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise SystemExit(f"{kind} of {model} ended with {process.returncode}: {said.read().decode()}")
    reached = ended if kind == "dry-run" else float(entered.read_text())
    return Timing(reached - began, usage.ru_utime + usage.ru_stime)


def table(runs: tuple[Run, ...]) -> str:
    """Markdown: medians, lowest and highest in brackets; what is added is a difference within a round."""
    lines = ["| model | | seconds | processor seconds |", "|---|---|---|---|"]
    for model in dict.fromkeys(run.model for run in runs):
        by_kind = {kind: [run for run in runs if (run.model, run.kind) == (model, kind)] for kind in KINDS}
        for kind, mine in by_kind.items():
            lines.append(
                f"| {model} | {kind} | {_spread([r.wall_s for r in mine])} | {_spread([r.cpu_s for r in mine])} |"
            )
        pairs = list(zip(by_kind["serve"], by_kind["direct"], strict=True))
        wall, cpu = ([a.wall_s - b.wall_s for a, b in pairs], [a.cpu_s - b.cpu_s for a, b in pairs])
        lines.append(f"| {model} | added by serve | {_spread(wall)} | {_spread(cpu)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="verifier directories, or drafts' runs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON file with every start")
    arguments = parser.parse_args()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as scratch:
        environment = stand_in(Path(scratch) / "vllm")
        entered = Path(scratch) / "entered"
        for number in range(-1, arguments.rounds):  # the first round fills the caches, and is not kept
            for model in arguments.models:
                for kind in KINDS if number % 2 else reversed(KINDS):
                    timing = time_start(kind, model, environment, entered)
                    runs += [Run(model=model, kind=kind, round=number, **timing._asdict())] if number >= 0 else []
    if arguments.output:
        write_json(arguments.output, Result(runs=tuple(runs), provenance=Provenance.collect()))
    print(table(tuple(runs)))


if __name__ == "__main__":
    main()

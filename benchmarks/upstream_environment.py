"""An environment of its own for upstream: it shares the import name `speculators` with us, so never in ours.

Made once under the user's cache directory. The trap: its requirements name torchvision and torchaudio, whose PyPI
builds don't import beside CPU torch and break transformers; text models need neither, so they are left out.
"""

import subprocess
import sys
from pathlib import Path

from speculators.errors import UserError
from speculators.wheels import cache_directory

UPSTREAM = ("speculators==0.9.0", "hs-connectors==0.9.0")
_NEEDS = (
    "transformers==5.19.0", "aiohttp", "click", "datasets>=4,<=5.1", "httpx", "huggingface-hub", "loguru", "numpy>=2",
    "openai>=2", "packaging", "protobuf", "psutil", "pydantic>=2", "pydantic-settings", "rich", "safetensors", "tqdm",
    "typer",
)  # fmt: skip
_TORCH = Path(__file__).parents[1] / "requirements" / "torch-cpu.txt"


def upstream_python(given: Path | None) -> Path:
    """The interpreter to run upstream with: `given`, or that of the environment in the cache, which is made if need be.

    Raises:
        UserError: `given` is no interpreter with upstream 0.9.0, or pip can't install it.
    """
    if given is not None:
        _check(given)
        return given
    directory = cache_directory() / "upstream-0.9.0"
    python, complete = directory / "bin" / "python", directory / ".complete"
    if not complete.exists():
        print(f"installing {', '.join(UPSTREAM)} into {directory}", file=sys.stderr)
        _run([sys.executable, "-m", "venv", "--clear", str(directory)])
        _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(_TORCH)])
        _run([str(python), "-m", "pip", "install", "--quiet", *_NEEDS])
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *UPSTREAM])
        _check(python)
        complete.touch()
    return python


def _check(python: Path) -> None:
    code = "from importlib.metadata import version; print(version('speculators'))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    except OSError as error:
        raise UserError(f"--upstream-python: {python} cannot be started ({error.strerror}).") from None
    if found.stdout.strip() != "0.9.0":
        raise UserError(
            f"--upstream-python: {python} has speculators {found.stdout.strip() or 'not installed'}, the comparison is "
            "with 0.9.0; leave the option out, and an environment is made."
        )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"upstream's environment: {' '.join(command[:6])} failed ({last}); give --upstream-python.")

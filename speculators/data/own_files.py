"""Which files in a server's directory are answers to our questions, also those that arrive after we stopped asking.

vLLM names a file after the question's `X-Request-Id`; ours hold a mark of this process. A question that was cut short
is still answered by a file, now or later, so its mark stays open until that file was found. The trap: a file is ours
by its mark alone, and only directly in the directory that we were told: nothing else is ever deleted.
"""

import fcntl
import hashlib
import itertools
import os
import re
import socket
import threading
import time
from pathlib import Path

_EXPECTED_S = 900.0
_counter = itertools.count()


class OwnFiles:
    """The marks of one process's questions to the servers that write to `directory`; what a killed process left there
    goes first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        remove_abandoned(directory)
        self._open: dict[str, float] = {}
        self._lock = threading.Lock()

    def mark(self) -> str:
        """The name of a new question."""
        return f"{_prefix()}-{os.getpid()}-{next(_counter):06d}-"

    def expect(self, mark: str) -> None:
        """The question failed, and yet its file may come."""
        with self._lock:
            self._open[mark] = time.monotonic()

    def sweep(self) -> float:
        """Delete expected files that are whole.

        Returns:
            Seconds since the youngest question failed whose file has not been seen; infinity when none is missing. A
            file that is still being written counts as 0.
        """
        with self._lock:
            now = time.monotonic()
            self._open = {mark: since for mark, since in self._open.items() if now - since < _EXPECTED_S}
            if not self._open:
                return float("inf")
            writing = False
            for mark, file in self._found():
                if remove_if_whole(file):
                    self._open.pop(mark, None)
                else:
                    writing = True
            youngest = max(self._open.values(), default=float("-inf"))
            return 0.0 if writing else now - youngest

    def sweep_rest(self) -> None:
        """Delete every whole file of this process's questions, expected or not: nobody waits for one any more. A
        server that was killed may have left a lock whose question was settled long ago."""
        for file in _files(self.directory):
            if f"{_prefix()}-{os.getpid()}-" in file.name:
                remove_if_whole(file.with_name(file.name.removesuffix(".lock")))

    def _found(self) -> list[tuple[str, Path]]:
        found = {}
        for file in _files(self.directory):
            for mark in self._open:
                if mark in file.name:
                    found[file.with_name(file.name.removesuffix(".lock"))] = mark
        return [(mark, file) for file, mark in found.items()]


def remove_if_whole(file: Path) -> bool:
    """Delete a file and its lock unless its writer still holds the lock; whether they are gone."""
    lock = file.with_name(file.name + ".lock")
    try:
        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # no lock: nobody writes
    file.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
    return True


def remove_abandoned(directory: Path) -> int:
    """Delete what a killed process of ours, on this machine, left in the directory; gives the number of files."""
    removed = 0
    for file in _files(directory):
        owner = re.search(rf"{_prefix()}-(\d+)-\d{{6,}}-", file.name)
        gone = owner is not None and not Path(f"/proc/{owner[1]}").exists()
        if gone and not file.name.endswith(".lock") and remove_if_whole(file):
            removed += 1
        elif gone and not file.with_name(file.name.removesuffix(".lock")).exists():
            remove_if_whole(file.with_name(file.name.removesuffix(".lock")))
    return removed


def _files(directory: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(directory) if entry.is_file(follow_symlinks=False)]
    except OSError:
        return []  # not made yet, or gone


def _prefix() -> str:
    """Of this machine and its namespace of process numbers: a number means nothing elsewhere."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return "speculators-" + hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]

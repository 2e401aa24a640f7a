"""The index of a hidden-state cache: one line a sample with its token count and the checksum of its file.

Every writer appends to a file of its own under `index/`, so that threads, processes, machines that share the directory
and caches copied into each other need no lock; a line is one write, and a torn one is skipped. A line goes out before
its file moves into place, so a file never waits for its checksum; one without a line was written before there was an
index, or its line was lost. The trap: a sample that was written twice has two lines, and the file fits one of them.
"""

import os
import threading
import time
import uuid
import zlib
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from speculators.schema import Strict


class IndexLine(Strict):
    """One stored sample; `crc32` is over the whole file."""

    sample_id: str
    tokens: int
    crc32: int


class Entry(NamedTuple):
    """What the index knows of a sample: tokens, and the checksum of every file that was ever written for it."""

    tokens: int
    checksums: tuple[int, ...]

    def fits(self, content: bytes) -> bool:
        """Whether a file with this content was written for the sample."""
        return zlib.crc32(content) in self.checksums


class CacheIndex:
    """Reads all lines at the first question; `add` and questions may come from several threads."""

    def __init__(self, cache: Path) -> None:
        self.path = cache / "index"
        self._entries: dict[str, Entry] = {}
        self._read_to: dict[str, int] = {}
        self._writer: int | None = None
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self._close()

    def entry(self, sample_id: str) -> Entry | None:
        """What is known of a sample; None if nothing. Lines that others add meanwhile are found too."""
        with self._lock:
            if sample_id not in self._entries:
                self._read()
            return self._entries.get(sample_id)

    def without_line(self, sample_ids: list[str]) -> list[str]:
        """Those of the samples that the index does not know."""
        with self._lock:
            self._read()
            return [sample_id for sample_id in sample_ids if sample_id not in self._entries]

    def add(self, sample_id: str, tokens: int, content: bytes) -> None:
        """Append the line of a sample whose file holds `content`.

        Raises:
            OSError: the line could not be written whole, as on a full disk.
        """
        line = IndexLine(sample_id=sample_id, tokens=tokens, crc32=zlib.crc32(content))
        text = (line.model_dump_json() + "\n").encode()
        with self._lock:
            if self._writer is None:
                self._writer = self._open()
            written = 0
            try:
                while written < len(text):  # what is left after a short write says why
                    written += os.write(self._writer, text[written:])
            finally:
                if written < len(text):
                    self._close()  # no line is ever appended to a torn one
            self._take(line)

    def _open(self) -> int:
        self.path.mkdir(parents=True, exist_ok=True)
        name = f"{time.time_ns():x}-{uuid.uuid4().hex[:8]}.jsonl"
        return os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def _close(self) -> None:
        if self._writer is not None:
            os.close(self._writer)
            self._writer = None

    def _read(self) -> None:
        """Take what was appended since the last time; a last line without an end is read once it has one."""
        for file in sorted(self.path.glob("*.jsonl")):
            with file.open("rb") as lines:
                lines.seek(self._read_to.get(file.name, 0))
                text = lines.read()
            whole = text.rfind(b"\n") + 1
            self._read_to[file.name] = self._read_to.get(file.name, 0) + whole
            for line in text[:whole].splitlines():
                try:
                    self._take(IndexLine.model_validate_json(line))
                except ValidationError:
                    continue  # damaged: its sample has no line, which `without_line` tells

    def _take(self, line: IndexLine) -> None:
        known = self._entries.get(line.sample_id, Entry(line.tokens, ()))
        if line.crc32 not in known.checksums:
            self._entries[line.sample_id] = Entry(line.tokens, (*known.checksums, line.crc32))

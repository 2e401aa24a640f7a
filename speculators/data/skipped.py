"""Samples that a run left out because their hidden states could not be had: `skipped.jsonl` in the run directory.

All ranks append to it, a whole line at a time; it outlives a resume, so a sample may be listed twice. No torch.
"""

import threading
import time
from pathlib import Path

from speculators.schema import Strict

SKIPPED_LOG = "skipped.jsonl"


class SkippedSample(Strict):
    """One sample, the split it is in, and why it was left out; `time_s` since 1970."""

    sample_id: str
    split: str
    tokens: int
    reason: str
    time_s: float


class SkippedLog:
    """Appends each sample once in the life of this process; several threads may."""

    def __init__(self, run: Path | None = None) -> None:
        self._file = run / SKIPPED_LOG if run else None
        self._known: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def add(self, sample_id: str, split: str, tokens: int, reason: str) -> None:
        """List a sample."""
        with self._lock:
            if (sample_id, split) in self._known:
                return
            self._known.add((sample_id, split))
            if self._file:
                record = SkippedSample(
                    sample_id=sample_id, split=split, tokens=tokens, reason=reason, time_s=round(time.time(), 3)
                )
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(record.model_dump_json() + "\n")


def read_skipped(run: Path) -> list[SkippedSample]:
    """The samples that a run left out, each once per split; a last line cut off by a crash is not read."""
    file = run / SKIPPED_LOG
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    records = [SkippedSample.model_validate_json(line) for line in lines]
    return list({(record.sample_id, record.split): record for record in records}.values())

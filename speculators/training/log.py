"""What a run writes down: one JSON line a step in `train.jsonl`, a progress line on stderr, and the result."""

import resource
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import torch
from pydantic import BeforeValidator, TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from speculators.acceptance import Acceptance
from speculators.schema import Strict, write_text
from speculators.training.trackers import Trackers

TRAIN_LOG = "train.jsonl"
_PLAIN_LINE_EVERY_S = 30.0

# JSON has no nan: it is written as null and read back as nan.
Number = Annotated[float, BeforeValidator(lambda value: float("nan") if value is None else value)]


class StepRecord(Strict):
    """One optimizer step, all ranks together. `acceptance_length` is teacher-forced, on the rows of this step."""

    kind: Literal["step"] = "step"
    step: int
    epoch: Number
    loss: Number
    grad_norm: Number
    lr: Number
    acceptance_length: Number
    tokens: int
    targets: int
    tokens_per_s: Number
    data_wait_share: Number
    memory_bytes: int
    metrics: dict[str, Number]


class ValidationRecord(Strict):
    """One pass over the validation split, with the same random choices every time."""

    kind: Literal["validation"] = "validation"
    step: int
    loss: Number
    acceptance: Acceptance
    acceptance_length: Number
    marginal: tuple[Number, ...]
    conditional: tuple[Number, ...]
    seconds: float
    metrics: dict[str, Number]

    @classmethod
    def of(
        cls, step: int, loss: float, acceptance: Acceptance, seconds: float, metrics: dict[str, float]
    ) -> "ValidationRecord":
        """Derive the rates from the counts."""
        return cls(
            step=step,
            loss=loss,
            acceptance=acceptance,
            acceptance_length=acceptance.length,
            marginal=acceptance.marginal,
            conditional=acceptance.conditional,
            seconds=seconds,
            metrics=metrics,
        )


class TrainResult(Strict):
    """How a run ended. `tokens` counts this call's, `best` is empty in a run without validation, `skipped` counts the
    samples in skipped.jsonl."""

    run: str
    steps: int
    tokens: int
    seconds: float
    checkpoint: str
    best: str
    validation: ValidationRecord | None
    skipped: int = 0


RECORDS: TypeAdapter[Any] = TypeAdapter(StepRecord | ValidationRecord)


def read_log(run: Path) -> list[StepRecord | ValidationRecord]:
    """All records of a run, in order; a last line cut off by a crash is left out."""
    lines = (run / TRAIN_LOG).read_text(encoding="utf-8").split("\n")[:-1]
    return [RECORDS.validate_json(line) for line in lines]


class TrainLog:
    """A context manager that appends records and shows progress. Inactive on all ranks but the first."""

    def __init__(self, run: Path, step: int, total_steps: int, active: bool, trackers: Trackers | None = None) -> None:
        """Opens the log; records of steps after `step`, from a run that crashed since, are dropped."""
        self._trackers = trackers or Trackers()
        self._active, self._total, self._step = active, total_steps, step
        self._console = Console(stderr=True, highlight=False)
        self._file: TextIO | None = None
        self._shown = time.monotonic()
        self._accepted = ""
        self._progress = _progress_bar(self._console, enabled=active and self._console.is_terminal)
        if active:
            path = run / TRAIN_LOG
            kept = [r.model_dump_json() + "\n" for r in read_log(run) if r.step <= step] if path.exists() else []
            write_text(path, "".join(kept))
            self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "TrainLog":
        self._progress.start()
        self._task = self._progress.add_task("train", total=self._total, completed=self._step, note="")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._trackers.close()
        if self._file:
            self._file.close()

    def step(self, record: StepRecord) -> None:
        """Write a step; flushed at most once a second, so that logging costs nothing."""
        if not self._file:
            return
        self._file.write(record.model_dump_json() + "\n")
        self._trackers.log(record)
        note = f"loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tok/s{self._accepted}"
        self._progress.update(self._task, completed=record.step, note=note)
        now = time.monotonic()
        if now - self._shown > (1.0 if self._console.is_terminal else _PLAIN_LINE_EVERY_S):
            self._file.flush()
            self._shown = now
            if not self._console.is_terminal:
                self.say(f"step {record.step}/{self._total}  {note}  {self._remaining(record)} left")

    def validation(self, record: ValidationRecord) -> None:
        """Write and show a validation."""
        if not self._file:
            return
        self._file.write(record.model_dump_json() + "\n")
        self._file.flush()
        self._trackers.log(record)
        rates = " ".join(f"{rate:.2f}" for rate in record.conditional)
        self._accepted = f"  accepts {record.acceptance_length:.2f}"
        self.say(
            f"step {record.step}/{self._total}  validation loss {record.loss:.3f}  "
            f"acceptance length {record.acceptance_length:.3f}  conditional {rates}"
        )

    def flush(self) -> None:
        """Put everything on disk: a checkpoint must not be ahead of its log."""
        if self._file:
            self._file.flush()

    def say(self, text: str) -> None:
        """A line on stderr, above the progress bar."""
        if self._active:
            self._progress.console.print(text, soft_wrap=True)

    def _remaining(self, record: StepRecord) -> str:
        seconds = int((self._total - record.step) * record.tokens / record.tokens_per_s)
        return f"{seconds // 60}:{seconds % 60:02d}"


def _progress_bar(console: Console, enabled: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not enabled, refresh_per_second=2)


def memory_bytes(device: torch.device) -> int:
    """Peak memory: of the GPU in use, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

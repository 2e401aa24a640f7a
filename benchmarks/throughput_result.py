"""What a throughput measurement is made of, and its summary: medians of each side, ratios of runs that followed one
another. No torch. The trap: a ratio of medians hides that the machine changes between runs; the spread is over pairs.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from rich.table import Table
from training_job import Algorithm

from speculators.provenance import Provenance
from speculators.schema import Strict

Side = Literal["ours", "upstream"]


class Point(Strict):
    """What is varied."""

    algorithm: Algorithm
    row_length: int
    max_anchors: int
    draft_vocab_size: int


class Run(Strict):
    """One run of one side; a run that failed has a reason and no numbers."""

    point: Point
    side: Side
    tokens_per_s: float | None = None
    peak_over_resident_bytes: int | None = None
    resident_bytes: int | None = None
    failed: str = ""


class Conditions(Strict):
    """What a reader needs to doubt or to repeat the numbers."""

    provenance: Provenance
    upstream_packages: dict[str, str]
    processor_flags: tuple[str, ...]
    threads: str
    load_average: tuple[float, float, float]
    rows_full: dict[str, float]
    steps: int
    warmup: int


class ThroughputResult(Strict):
    """Every run, in the order in which they ran."""

    conditions: Conditions
    runs: tuple[Run, ...]


class Ratio(NamedTuple):
    """Median, least and most over pairs of runs."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


class Summary(NamedTuple):
    """A point: medians of each side and the ratios ours / upstream; None where a side failed."""

    point: Point
    ours_tokens_per_s: float | None
    upstream_tokens_per_s: float | None
    speed: Ratio | None
    ours_bytes: float | None
    upstream_bytes: float | None
    memory: Ratio | None


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary a point, in order of first appearance; the n-th run of ours is paired with the n-th of theirs."""
    summaries = []
    for key in dict.fromkeys(run.point.model_dump_json() for run in runs):
        ours, theirs = ([r for r in runs if r.point.model_dump_json() == key and r.side == s] for s in _SIDES)
        pairs = list(zip(ours, theirs, strict=False))
        summaries.append(
            Summary(
                point=ours[0].point if ours else theirs[0].point,
                ours_tokens_per_s=_median(run.tokens_per_s for run in ours),
                upstream_tokens_per_s=_median(run.tokens_per_s for run in theirs),
                speed=ratio((a.tokens_per_s, b.tokens_per_s) for a, b in pairs),
                ours_bytes=_median(run.peak_over_resident_bytes for run in ours),
                upstream_bytes=_median(run.peak_over_resident_bytes for run in theirs),
                memory=ratio((a.peak_over_resident_bytes, b.peak_over_resident_bytes) for a, b in pairs),
            )
        )
    return summaries


_SIDES: tuple[Side, Side] = ("ours", "upstream")


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratio(pairs: Iterable[tuple[float | None, float | None]]) -> Ratio | None:
    """Of pairs of runs; those with a failed one are left out."""
    ratios = [ours / theirs for ours, theirs in pairs if ours is not None and theirs]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def table(summaries: Iterable[Summary]) -> Table:
    """As shown on stdout."""
    shown = Table("algorithm", "row", "anchors", "vocabulary", title="training, ours against upstream 0.9.0")
    for name in ("ours tok/s", "upstream tok/s", "ratio", "ours MiB", "upstream MiB", "ratio"):
        shown.add_column(name, justify="right")
    for s in summaries:
        anchors = str(s.point.max_anchors) if s.point.algorithm == "dflash" else "-"
        shown.add_row(
            s.point.algorithm, str(s.point.row_length), anchors, str(s.point.draft_vocab_size),
            _number(s.ours_tokens_per_s), _number(s.upstream_tokens_per_s), str(s.speed or "failed"),
            _number(s.ours_bytes, 2**20), _number(s.upstream_bytes, 2**20), str(s.memory or "failed"),
        )  # fmt: skip
    return shown


def _number(value: float | None, unit: float = 1) -> str:
    return "failed" if value is None else f"{value / unit:,.0f}"

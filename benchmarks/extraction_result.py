"""What an extraction measurement is made of, and its sums: ratios within a round, shares weighted by time. No torch.

The trap: the mean of the steps' wait shares is not the share of the time waited, because steps that wait are longer.
"""

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from throughput_result import Ratio, ratio

from speculators.provenance import Provenance
from speculators.schema import Strict
from speculators.training.log import StepRecord

Side = Literal["ours", "bare", "upstream"]


class ExtractionRun(Strict):
    """One side over all samples once; `seconds` from the first request to the last stored state, without start-up."""

    side: Side
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens a second."""
        return self.tokens / self.seconds


class Memory(Strict):
    """A process over an epoch, in bytes: its resident size in the first and the last quarter (medians), at most; and
    what lay in the servers' directory at most."""

    start_bytes: int
    end_bytes: int
    peak_bytes: int
    storage_peak_bytes: int

    @property
    def growth(self) -> float:
        """Of the last quarter over the first, as a share: 0.02 is 2 % more."""
        return self.end_bytes / self.start_bytes - 1


class TrainingRun(Strict):
    """A training; `wait_share` is of all steps after the first ones, which wait for the pipeline to fill.

    Attributes:
        tokens_per_s: with the waiting.
        own_tokens_per_s: without: what the trainer alone could consume.
    """

    steps: int
    tokens_per_s: float
    own_tokens_per_s: float
    wait_share: float
    memory: Memory


class ExtractionResult(Strict):
    """Every run, in the order in which they ran, and what a reader needs to doubt or to repeat them."""

    provenance: Provenance
    load_average: tuple[float, float, float]
    server: str
    samples: int
    tokens: int
    concurrency: int
    runs: tuple[ExtractionRun, ...]
    offline: TrainingRun | None = None
    online: TrainingRun | None = None


class Compared(NamedTuple):
    """A side's median tokens/s, and ours over it, round by round."""

    side: Side
    tokens_per_s: float
    ours_over_it: Ratio


def compare(runs: Sequence[ExtractionRun]) -> list[Compared]:
    """The n-th run of ours is paired with the n-th of each other side."""
    sides: dict[Side, list[float]] = {}
    for run in runs:
        sides.setdefault(run.side, []).append(run.tokens_per_s)
    found = []
    for side, speeds in sides.items():
        over = ratio(zip(sides["ours"], speeds, strict=True))
        assert over
        found.append(Compared(side, statistics.median(speeds), over))
    return sorted(found, key=lambda compared: compared.side != "ours")


def training_run(records: Sequence[StepRecord], memory: Memory, warmup: int) -> TrainingRun:
    """Sums over the steps after the first `warmup`."""
    counted = records[warmup:]
    seconds = [record.tokens / record.tokens_per_s for record in counted]
    waited = sum(record.data_wait_share * took for record, took in zip(counted, seconds, strict=True))
    tokens = sum(record.tokens for record in counted)
    return TrainingRun(
        steps=len(records),
        tokens_per_s=tokens / sum(seconds),
        own_tokens_per_s=tokens / (sum(seconds) - waited),
        wait_share=waited / sum(seconds),
        memory=memory,
    )


def memory_over(resident: Sequence[int], storage: Sequence[int]) -> Memory:
    """From sizes seen at even intervals; at least one of each."""
    quarter = max(1, len(resident) // 4)
    return Memory(
        start_bytes=int(statistics.median(resident[:quarter])),
        end_bytes=int(statistics.median(resident[-quarter:])),
        peak_bytes=max(resident),
        storage_peak_bytes=max(storage),
    )


def verdict(server_tokens_per_s: float, online: TrainingRun, most: float = 0.1) -> str:
    """Whether a trainer that is slower than the server waits for less than `most` of its time."""
    faster = server_tokens_per_s > online.own_tokens_per_s
    speeds = (
        f"the server alone gives {server_tokens_per_s:,.0f} tokens/s, the trainer takes {online.own_tokens_per_s:,.0f}"
    )
    if not faster:
        return f"{speeds}: the trainer has to wait; it waited {online.wait_share:.1%} of its time"
    kept = "as required" if online.wait_share < most else "NOT as required"
    return (
        f"{speeds}: the trainer waited {online.wait_share:.1%} of its time, less than {most:.0%} is asked for, {kept}"
    )

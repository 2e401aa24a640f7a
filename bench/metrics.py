"""Metrics of a list of request records: pure functions, failed requests left out.

Two averages of acceptance are in use and differ: by step (all steps pooled, as vLLM's counters) and by request (the
mean of each request's own length). `ttft`, `tpot` and `e2e` weigh every request alike.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from bench.records import RequestRecord
from speculators.acceptance import Acceptance
from speculators.schema import Strict


class Spread(Strict):
    """Mean and quantiles of a quantity over requests."""

    mean: float
    p50: float
    p90: float
    p99: float


class PointMetrics(Strict):
    """What one variant did on one task (or on all) at one load.

    Attributes:
        num_failed: without those that were skipped because the prompt does not fit the server's context.
        acceptance: pooled over all steps; None without speculation.
        acceptance_length_by_request: mean of the requests' own acceptance lengths.
        acceptance_from_counters: the server told acceptance by its counters only.
        tpot_s: time per output token, which papers call inter-token latency.
        chunk_gap_s: time between chunks; under speculation a chunk holds several tokens.
        output_tokens_per_s: output tokens over end-to-end seconds, as one user sees it.
        user_tokens_per_s: the same for each request on its own.
        total_tokens_per_s: output tokens of all users over the time that the point took; None where that is unknown.
    """

    num_requests: int
    num_failed: int
    num_skipped: int = 0
    output_tokens: int
    acceptance: Acceptance | None
    acceptance_length_by_request: float | None
    acceptance_from_counters: bool = False
    ttft_s: Spread | None
    tpot_s: Spread | None
    chunk_gap_s: Spread | None
    e2e_s: Spread | None
    output_tokens_per_s: float | None
    user_tokens_per_s: Spread | None = None
    total_tokens_per_s: float | None = None


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean, median, 90th and 99th percentile of the values that are there; None when there is none."""
    return _quantiles(np.fromiter((value for value in values if value is not None), dtype=np.float64))


def _quantiles(present: np.ndarray) -> Spread | None:
    if not len(present):
        return None
    p50, p90, p99 = np.quantile(present, [0.5, 0.9, 0.99])
    return Spread(mean=float(np.mean(present)), p50=float(p50), p90=float(p90), p99=float(p99))


def pooled_acceptance(records: Iterable[RequestRecord]) -> Acceptance | None:
    """All steps of the successful requests in one count; None when no request has one."""
    parts = [record.acceptance for record in records if record.ok and record.acceptance is not None]
    if not parts:
        return None
    counts = [0] * max(len(part.histogram) for part in parts)
    for part in parts:
        for accepted, steps in enumerate(part.histogram):
            counts[accepted] += steps
    return Acceptance(histogram=tuple(counts), drafted=sum(part.drafted for part in parts))


def length_by_request(records: Iterable[RequestRecord]) -> float | None:
    """Mean of the requests' own acceptance lengths; requests without a step (one-token answers) have none."""
    lengths = [length for r in records if r.ok and (length := own_length(r))]
    return float(np.mean(lengths)) if lengths else None


def own_length(record: RequestRecord) -> float | None:
    """A request's acceptance length; None without a step."""
    length = record.acceptance.length if record.acceptance is not None else math.nan
    return None if math.isnan(length) else length


def summarise(
    records: Sequence[RequestRecord], counters: Acceptance | None = None, wall_s: float | None = None
) -> PointMetrics:
    """Metrics of one point.

    Args:
        counters: stands in where the requests tell no acceptance themselves.
        wall_s: how long the point took, pauses left out.
    """
    good = [record for record in records if record.ok]
    acceptance = pooled_acceptance(good)
    seconds = sum(record.e2e_s or 0.0 for record in good)
    tokens = sum(record.output_tokens or 0 for record in good)
    skipped = sum(record.skipped for record in records)
    return PointMetrics(
        num_requests=len(records),
        num_failed=len(records) - len(good) - skipped,
        num_skipped=skipped,
        output_tokens=tokens,
        acceptance=acceptance or counters,
        acceptance_length_by_request=length_by_request(good),
        acceptance_from_counters=acceptance is None and counters is not None,
        ttft_s=spread(record.ttft_s for record in good),
        tpot_s=spread(record.tpot_s for record in good),
        chunk_gap_s=_quantiles(
            np.concatenate([np.asarray(r.chunk_gaps_s, dtype=np.float64) for r in good] or [np.zeros(0)])
        ),
        e2e_s=spread(record.e2e_s for record in good),
        output_tokens_per_s=tokens / seconds if seconds else None,
        user_tokens_per_s=spread(r.output_tokens / r.e2e_s for r in good if r.output_tokens and r.e2e_s),
        total_tokens_per_s=tokens / wall_s if wall_s else None,
    )


def by_prompt(
    records: Iterable[RequestRecord], value: Callable[[RequestRecord], float | None]
) -> dict[tuple[str, str], list[float]]:
    """The values of the successful requests by (task, prompt), turns and repeats together."""
    grouped: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.ok and (number := value(record)) is not None:
            grouped.setdefault((record.task, record.prompt_id), []).append(number)
    return grouped

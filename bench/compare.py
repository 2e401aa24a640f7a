"""From records to verdicts: one variant against another on the same prompts at the same load, and how sure that is.

The unit is the prompt, or a group of prompts under load. The trap: an interval over prompts covers what other prompts
would have shown, not what the machine would have shown on another day; a variant that was measured while the machine
was busy looks slow.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from bench.conditions import DEFAULT_POINT
from bench.metrics import by_prompt, own_length
from bench.pairing import Groups, mean_interval, paired, send_groups, under_load
from bench.records import RequestRecord
from bench.stats import Interval, holm, prompts_to_settle, ratio_interval
from speculators.schema import Strict

ALL_TASKS = "all tasks"
DRIFT_LIMIT = 0.05
Verdict = Literal["better", "worse", "equivalent", "inconclusive"]
Metric = Literal["speed_up", "acceptance_length"]


class Estimate(Strict):
    """A quantity of one variant on one task with its 95 % interval (None below five prompts)."""

    metric: Literal["acceptance_length", "tpot_s"]
    task: str
    variant: str
    estimate: float
    low: float | None
    high: float | None
    num_prompts: int


class Comparison(Strict):
    """One variant against `reference` on the same prompts; more is better.

    Attributes:
        metric: the geometric mean over prompts of a ratio: `speed_up` of the reference's time per output token over the
            variant's, `acceptance_length` of the variant's own length over the reference's.
        p_value: of "no difference"; the verdict takes Holm's correction over the variant's tasks into account.
        verdict: `equivalent` when the whole interval lies within the margin around 1, else `better` or `worse` when the
            difference is significant, else `inconclusive`.
        prompts_needed: how many prompts would probably (80 %) settle an inconclusive one; None where that is unknown.
        doubtful: the machine changed its speed meanwhile (see `Drift`).
    """

    metric: Metric = "speed_up"
    task: str
    point: str = DEFAULT_POINT
    variant: str
    reference: str
    estimate: float
    low: float | None
    high: float | None
    p_value: float
    num_prompts: int
    verdict: Verdict
    prompts_needed: int | None = None
    doubtful: bool = False


class Drift(Strict):
    """How the plain verifier's time per output token changed from the run's start to its end.

    Attributes:
        reference: the baseline that was measured twice.
        ratio: the closing pass over the first one, geometric mean over the same prompts.
    """

    reference: str
    point: str
    ratio: float
    low: float | None
    high: float | None
    num_prompts: int

    @property
    def exceeded(self) -> bool:
        """Whether latency verdicts at this load are marked."""
        return abs(math.log(self.ratio)) > math.log1p(DRIFT_LIMIT)


def acceptance_length(records: Sequence[RequestRecord], task: str, variant: str, seed: int = 0) -> Estimate | None:
    """Acceptance length by step over `records` (of one variant and task), clustered by prompt; None without steps."""
    accepted = by_prompt(records, lambda r: r.acceptance.accepted if r.acceptance else None)
    steps = by_prompt(records, lambda r: r.acceptance.steps if r.acceptance else None)
    kept = [key for key in steps if sum(steps[key])]
    if not kept:
        return None
    interval = ratio_interval(
        np.array([sum(accepted[key]) + sum(steps[key]) for key in kept]),
        np.array([sum(steps[key]) for key in kept]),
        seed,
    )
    # With few prompts the interval may reach below what is possible: every step emits a token.
    interval = interval._replace(low=max(1.0, interval.low)) if interval.low < 1 else interval
    return _estimate("acceptance_length", task, variant, interval, len(kept))


def time_per_token(records: Sequence[RequestRecord], task: str, variant: str, seed: int = 0) -> Estimate | None:
    """Mean time per output token over prompts (each prompt its requests' mean); None when no request has one."""
    values = [(record, record.tpot_s) for record in records if record.ok and record.tpot_s is not None]
    if not values:
        return None
    groups = send_groups(records) if under_load(records) else None
    return _estimate("tpot_s", task, variant, *mean_interval(values, groups, seed))


def speed_ups(
    variant_records: Sequence[RequestRecord],
    reference_records: Sequence[RequestRecord],
    tasks: Sequence[str],
    margin: float,
    seed: int = 0,
) -> list[Comparison]:
    """Speed-up of one variant over a reference for each task and over all of them; empty without a common prompt.

    The tasks are one family of hypotheses under Holm's correction; the row over all tasks is a question of its own.
    Both sides are of one load. Where requests run together, neighbours are one cluster and repeats another.
    """
    pairs = paired(variant_records, reference_records, lambda r: 1 / r.tpot_s if r.tpot_s else None)
    groups = send_groups(reference_records) if under_load(reference_records) else None
    return _compare("speed_up", pairs, reference_records, groups, tasks, margin, seed)


def acceptance_ratios(
    variant_records: Sequence[RequestRecord],
    reference_records: Sequence[RequestRecord],
    tasks: Sequence[str],
    margin: float,
    seed: int = 0,
) -> list[Comparison]:
    """The same for acceptance lengths of two drafts. Load hardly moves these, so the prompt is the cluster."""
    pairs = paired(variant_records, reference_records, own_length)
    return _compare("acceptance_length", pairs, reference_records, None, tasks, margin, seed)


def drift(closing: Sequence[RequestRecord], opening: Sequence[RequestRecord], seed: int = 0) -> Drift | None:
    """The baseline's closing pass against its first one; None without a common prompt."""
    pairs = paired(closing, opening, lambda r: r.tpot_s)
    if not pairs:
        return None
    groups = send_groups(opening) if under_load(opening) else None
    interval, num_prompts = mean_interval(pairs, groups, seed)
    low, high = _ends(interval, math.exp)
    first = opening[0]
    return Drift(
        reference=first.variant,
        point=first.point,
        ratio=math.exp(interval.estimate),
        low=low,
        high=high,
        num_prompts=num_prompts,
    )


def verdict_of(low: float | None, high: float | None, estimate: float, significant: bool, margin: float) -> Verdict:
    """The verdict on a ratio whose larger values are better."""
    if low is None or high is None:
        return "inconclusive"
    if low > 1 / (1 + margin) and high < 1 + margin:
        return "equivalent"
    if not significant:
        return "inconclusive"
    return "better" if estimate > 1 else "worse"


def _compare(
    metric: Metric,
    pairs: Sequence[tuple[RequestRecord, float]],
    reference: Sequence[RequestRecord],
    groups: Groups | None,
    tasks: Sequence[str],
    margin: float,
    seed: int,
) -> list[Comparison]:
    if not pairs:
        return []
    parts = {task: [pair for pair in pairs if pair[0].task == task] for task in tasks}
    found = {task: mean_interval(mine, groups, seed) for task, mine in parts.items() if mine}
    significant = dict(zip(found, holm([i.p_value(0.0) for i, _ in found.values()]), strict=True))
    pooled = mean_interval(pairs, groups, seed)
    rows = [(task, interval, n, significant[task], len(found)) for task, (interval, n) in found.items()]
    rows.append((ALL_TASKS, *pooled, holm([pooled[0].p_value(0.0)])[0], 1))
    names = pairs[0][0].variant, reference[0].variant
    return [_comparison(metric, names, pairs[0][0].point, margin, *row) for row in rows]


def _comparison(
    metric: Metric,
    names: tuple[str, str],
    point: str,
    margin: float,
    task: str,
    interval: Interval,
    num_prompts: int,
    significant: bool,
    family: int,
) -> Comparison:
    low, high = _ends(interval, math.exp)
    estimate = math.exp(interval.estimate)
    verdict = verdict_of(low, high, estimate, significant, margin)
    more = prompts_to_settle(interval, margin, family) if verdict == "inconclusive" else None
    return Comparison(
        metric=metric,
        task=task,
        point=point,
        variant=names[0],
        reference=names[1],
        estimate=estimate,
        low=low,
        high=high,
        p_value=interval.p_value(0.0),
        num_prompts=num_prompts,
        verdict=verdict,
        prompts_needed=max(num_prompts + 1, math.ceil(num_prompts * more)) if more is not None else None,
    )


def _ends(interval: Interval, scale: Callable[[float], float] = float) -> tuple[float | None, float | None]:
    return tuple(None if math.isnan(end) else scale(end) for end in (interval.low, interval.high))  # type: ignore[return-value]


def _estimate(
    metric: Literal["acceptance_length", "tpot_s"], task: str, variant: str, interval: Interval, num_prompts: int
) -> Estimate:
    low, high = _ends(interval)
    return Estimate(
        metric=metric,
        task=task,
        variant=variant,
        estimate=interval.estimate,
        low=low,
        high=high,
        num_prompts=num_prompts,
    )

"""From records to verdicts: each variant against a reference on the same prompts, with how sure the answer is.

The unit is the prompt. The trap: an interval over prompts covers what other prompts would have shown, not what the
machine would have shown on another day; a variant that was measured while the machine was busy looks slow.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from bench.metrics import by_prompt
from bench.records import RequestKey, RequestRecord
from bench.stats import Interval, holm, ratio_interval
from speculators.schema import Strict

ALL_TASKS = "all tasks"
Verdict = Literal["better", "worse", "equivalent", "inconclusive"]


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
    """One variant against `reference` on the same prompts.

    Attributes:
        metric: `speed_up`, the geometric mean over prompts of the reference's time per output token over the variant's.
        p_value: of "no difference"; the verdict takes Holm's correction over the variant's tasks into account.
        verdict: `equivalent` when the whole interval lies within the margin around 1, else `better` or `worse` when the
            difference is significant, else `inconclusive`.
    """

    metric: Literal["speed_up"] = "speed_up"
    task: str
    variant: str
    reference: str
    estimate: float
    low: float | None
    high: float | None
    p_value: float
    num_prompts: int
    verdict: Verdict


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
    return _estimate("acceptance_length", task, variant, interval)


def time_per_token(records: Sequence[RequestRecord], task: str, variant: str, seed: int = 0) -> Estimate | None:
    """Mean time per output token over prompts (each prompt its requests' mean); None when no request has one."""
    values = by_prompt(records, lambda r: r.tpot_s)
    if not values:
        return None
    interval = ratio_interval(np.array([np.mean(times) for times in values.values()]), seed=seed)
    return _estimate("tpot_s", task, variant, interval)


def speed_ups(
    variant_records: Sequence[RequestRecord],
    reference_records: Sequence[RequestRecord],
    tasks: Sequence[str],
    margin: float,
    seed: int = 0,
) -> list[Comparison]:
    """Speed-up of one variant over a reference for each task and over all of them; empty without a common prompt.

    The tasks are one family of hypotheses under Holm's correction; the row over all tasks is a question of its own.
    """
    ratios = paired_log_ratios(variant_records, reference_records)
    if not ratios:
        return []
    names = variant_records[0].variant, reference_records[0].variant
    intervals: dict[str, Interval] = {}
    for task in tasks:
        values = [ratio for (of_task, _), ratio in ratios.items() if of_task == task]
        if values:
            intervals[task] = ratio_interval(np.array(values), seed=seed)
    significant = dict(zip(intervals, holm([i.p_value(0.0) for i in intervals.values()]), strict=True))
    comparisons = [_comparison(task, names, i, significant[task], margin) for task, i in intervals.items()]
    pooled = ratio_interval(np.array(list(ratios.values())), seed=seed)
    return [*comparisons, _comparison(ALL_TASKS, names, pooled, holm([pooled.p_value(0.0)])[0], margin)]


def paired_log_ratios(
    variant_records: Sequence[RequestRecord], reference_records: Sequence[RequestRecord]
) -> dict[tuple[str, str], float]:
    """ln(reference's time per token / variant's) for each (task, prompt) that both have, averaged over its requests.

    Only requests that succeeded on both sides are paired, so a failure takes its counterpart out too.
    """
    reference = {without_variant(r.key): r.tpot_s for r in reference_records if r.ok and r.tpot_s}

    def log_ratio(record: RequestRecord) -> float | None:
        other = reference.get(without_variant(record.key))
        return math.log(other / record.tpot_s) if other and record.tpot_s else None

    return {key: float(np.mean(values)) for key, values in by_prompt(variant_records, log_ratio).items()}


def verdict_of(low: float | None, high: float | None, estimate: float, significant: bool, margin: float) -> Verdict:
    """The verdict on a ratio whose larger values are better."""
    if low is None or high is None:
        return "inconclusive"
    if low > 1 / (1 + margin) and high < 1 + margin:
        return "equivalent"
    if not significant:
        return "inconclusive"
    return "better" if estimate > 1 else "worse"


def _comparison(task: str, names: tuple[str, str], interval: Interval, significant: bool, margin: float) -> Comparison:
    low, high = (None if math.isnan(end) else math.exp(end) for end in (interval.low, interval.high))
    estimate = math.exp(interval.estimate)
    return Comparison(
        task=task,
        variant=names[0],
        reference=names[1],
        estimate=estimate,
        low=low,
        high=high,
        p_value=interval.p_value(0.0),
        num_prompts=interval.num_clusters,
        verdict=verdict_of(low, high, estimate, significant, margin),
    )


def without_variant(key: RequestKey) -> RequestKey:
    """The key that the same request of another variant has, too."""
    return key._replace(variant="")


def _estimate(metric: Literal["acceptance_length", "tpot_s"], task: str, variant: str, interval: Interval) -> Estimate:
    low, high = (None if math.isnan(end) else end for end in (interval.low, interval.high))
    return Estimate(
        metric=metric,
        task=task,
        variant=variant,
        estimate=interval.estimate,
        low=low,
        high=high,
        num_prompts=interval.num_clusters,
    )

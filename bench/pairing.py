"""Which values belong together: one request of two variants, the requests of a prompt, prompts that ran together."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from bench.conditions import DEFAULT_POINT
from bench.records import RequestRecord
from bench.stats import MIN_CLUSTERS, Interval, crossed_interval, ratio_interval

Value = Callable[[RequestRecord], float | None]
Groups = dict[tuple[str, str], int]
_LEAST_GROUPS = 2 * MIN_CLUSTERS


def same_request(record: RequestRecord) -> tuple[str, str, int, int, str]:
    """What a request has in common with that of another variant or of another pass."""
    return record.task, record.prompt_id, record.turn, record.repeat, record.point


def paired(
    mine: Sequence[RequestRecord], other: Sequence[RequestRecord], value: Value
) -> list[tuple[RequestRecord, float]]:
    """ln(my value / the other's) of each request that succeeded on both sides: a failure takes its counterpart out."""
    reference = {same_request(r): v for r in other if r.ok and (v := value(r))}
    return [
        (record, math.log(own / theirs))
        for record in mine
        if record.ok and (own := value(record)) and (theirs := reference.get(same_request(record)))
    ]


def of_prompt(values: Sequence[tuple[RequestRecord, float]]) -> dict[tuple[str, str], list[float]]:
    grouped: dict[tuple[str, str], list[float]] = {}
    for record, number in values:
        grouped.setdefault((record.task, record.prompt_id), []).append(number)
    return grouped


def mean_interval(
    values: Sequence[tuple[RequestRecord, float]], groups: Groups | None, seed: int
) -> tuple[Interval, int]:
    """Interval of the mean over prompts, and the number of these: by prompt, or with `groups` by group and repeat."""
    prompts = of_prompt(values)
    if groups is None:
        return ratio_interval(np.array([sum(numbers) / len(numbers) for numbers in prompts.values()]), seed=seed), len(
            prompts
        )
    interval = crossed_interval(
        np.array([number for _, number in values]),
        np.array([groups.get((record.task, record.prompt_id), -1) for record, _ in values]),
        np.array([record.repeat for record, _ in values]),
        seed,
    )
    return interval, len(prompts)


def paired_log_ratios(
    variant_records: Sequence[RequestRecord], reference_records: Sequence[RequestRecord]
) -> dict[tuple[str, str], float]:
    """ln(reference's time per token / variant's) for each (task, prompt) that both have, averaged over its requests."""
    pairs = paired(variant_records, reference_records, lambda r: 1 / r.tpot_s if r.tpot_s else None)
    return {key: sum(values) / len(values) for key, values in of_prompt(pairs).items()}


def under_load(records: Sequence[RequestRecord]) -> bool:
    """Whether requests ran beside each other."""
    return bool(records) and records[0].point != DEFAULT_POINT


def send_groups(records: Sequence[RequestRecord]) -> Groups:
    """Which prompts ran beside each other: neighbours in the order of sending, as many as were in flight.

    At a rate of arrivals that many are rate x mean seconds (Little's law). Groups are made smaller where fewer than ten
    would be left in a task.
    """
    started: dict[tuple[str, str], float] = {}
    for record in records:
        if record.ok:
            at = (record.task, record.prompt_id)
            started[at] = min(started.get(at, math.inf), record.started_s)
    number = float(records[0].point[1:])
    seconds = np.mean([record.e2e_s for record in records if record.ok and record.e2e_s] or [1.0])
    in_flight = number if records[0].point.startswith("c") else number * float(seconds)
    groups: Groups = {}
    total = 0
    for task in dict.fromkeys(task for task, _ in started):
        ordered = sorted((at for at in started if at[0] == task), key=lambda at: started[at])
        size = max(1, min(round(in_flight), len(ordered) // _LEAST_GROUPS))
        groups |= {at: total + place // size for place, at in enumerate(ordered)}
        total += math.ceil(len(ordered) / size)
    return groups

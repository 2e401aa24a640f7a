"""What to set: the best number of speculative tokens for each draft, task and load, and where speculation stops paying.

A verification step takes tpot x acceptance length seconds. Between the K that were measured (K = 0 is the plain
verifier) step time is taken to be linear. A smaller K is predicted for eagle3 alone, whose acceptance is a chain and
may be cut off; a dflash draft at another K sees other mask tokens, so only measured K count. The trap: with one
measured K the cost that a draft has at any K is spread over all of them, which flatters small K.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bench.compare import ALL_TASKS
from bench.conditions import DEFAULT_POINT, Variant
from bench.summary import Cell
from speculators.acceptance import Acceptance
from speculators.schema import Strict

CHAINS = ("eagle3",)


class Decision(Strict):
    """What to set for one draft on one task at one load.

    Attributes:
        variant: the draft's first variant in the order of the run; others may differ from it in K alone.
        best_k: `num_speculative_tokens` to set; 0 means: do not speculate here.
        expected_speedup: at `best_k` over the plain verifier; of the best K tried if that does not pay.
        measured: whether `best_k` itself was measured.
    """

    variant: str
    task: str
    point: str = DEFAULT_POINT
    best_k: int
    expected_speedup: float
    measured: bool
    reason: str


class BreakEven(Strict):
    """From which concurrency on a draft costs more than it brings; None while it pays at every one measured."""

    variant: str
    task: str
    concurrency: float | None
    reason: str


class StepTime(Strict):
    """The cost model: seconds of one verification step with K draft tokens at one load, over all tasks.

    Attributes:
        num_speculative_tokens: K; 0 is the plain verifier, whose step is one token.
    """

    variant: str
    point: str
    num_speculative_tokens: int
    step_s: float


class Measured(NamedTuple):
    """One K of a draft on one task at one load.

    Attributes:
        k: draft tokens a step.
        step_s: seconds a verification step takes.
        speed_up: over the plain verifier.
        doubt: why that is no verdict; empty when it is one.
    """

    k: int
    acceptance: Acceptance
    step_s: float
    speed_up: float
    doubt: str


def decisions(
    variants: Sequence[Variant], cells: Sequence[Cell], references: dict[str, str], margin: float
) -> list[Decision]:
    """One decision for each draft, task and load at which it was compared with the plain verifier.

    Args:
        references: variant -> the plain variant with the same weights, which is what K = 0 would be.
        margin: a speed-up within it is not worth speculating for.
    """
    at = {(cell.variant, cell.task, cell.point): cell for cell in cells}
    found = []
    for members in _families(variants):
        for task, point in dict.fromkeys((cell.task, cell.point) for cell in cells):
            plain = at.get((references.get(members[0].name, ""), task, point))
            plain_s = plain.time_per_token.estimate if plain and plain.time_per_token else None
            measured = [m for v in members if (m := _measured(v, at.get((v.name, task, point)), plain))]
            if measured and plain_s is not None:
                measured.sort(key=lambda m: m.k)
                found.append(_decide(members[0], measured, plain_s, margin, task, point))
    return found


def break_evens(found: Sequence[Decision]) -> list[BreakEven]:
    """Where each draft's expected speed-up crosses 1 between measured concurrencies (straight in their logarithm)."""
    rows = []
    drafts = dict.fromkeys((d.variant, d.task) for d in found if d.task == ALL_TASKS or only_task(found))
    for variant, task in drafts:
        mine = [d for d in found if (d.variant, d.task) == (variant, task) and d.point.startswith("c")]
        curve = sorted((float(d.point[1:]), d.expected_speedup) for d in mine)
        if len(curve) > 1:
            rows.append(BreakEven(variant=variant, task=task, **_crossing(curve)))
    return rows


def step_times(variants: Sequence[Variant], cells: Sequence[Cell], references: dict[str, str]) -> list[StepTime]:
    """What a step takes at every load and K that was measured, over all tasks (or the only one)."""
    at = {(cell.variant, cell.point): cell for cell in cells if cell.task == ALL_TASKS}
    rows = []
    for point in dict.fromkeys(cell.point for cell in cells):
        for variant in variants:
            cell, plain = at.get((variant.name, point)), at.get((references.get(variant.name, ""), point))
            if measured := _measured(variant, cell, plain):
                rows.append((variant.name, point, measured.k, measured.step_s))
            elif cell and cell.time_per_token and not variant.speculates and not cell.metrics.acceptance:
                rows.append((variant.name, point, 0, cell.time_per_token.estimate))
    return [StepTime(variant=v, point=p, num_speculative_tokens=k, step_s=s) for v, p, k, s in rows]


def only_task(found: Sequence[Decision]) -> bool:
    """Whether there is a single task, so that no row is over all of them."""
    return ALL_TASKS not in {d.task for d in found}


def _crossing(curve: Sequence[tuple[float, float]]) -> dict[str, float | str | None]:
    if curve[0][1] <= 1:
        return {"concurrency": curve[0][0], "reason": "it pays at no concurrency that was measured"}
    for (low, above), (high, below) in pairwise(curve):
        if below <= 1:
            share = (above - 1) / (above - below)
            at = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
            return {"concurrency": at, "reason": f"between {low:g} and {high:g} requests in flight the gain ends"}
    return {"concurrency": None, "reason": f"it still pays at {curve[-1][0]:g} requests in flight, the most measured"}


def _families(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Variants that differ in K alone."""
    families: dict[tuple[object, ...], list[Variant]] = {}
    for variant in variants:
        if variant.speculates or variant.url:
            same = variant.draft, variant.draft_revision, variant.algorithm, variant.verifier, variant.url
            families.setdefault(same, []).append(variant)
    return list(families.values())


def _measured(variant: Variant, cell: Cell | None, plain: Cell | None) -> Measured | None:
    """None where nothing was drafted, or nothing compared with the plain verifier."""
    if not cell or not cell.speed_up or not cell.time_per_token:
        return None
    acceptance = cell.metrics.acceptance
    if acceptance is None or not acceptance.steps:
        return None
    k = variant.num_speculative_tokens or acceptance.num_speculative_tokens
    doubt = "which is not settled yet" if cell.speed_up.verdict == "inconclusive" else ""
    if cell.speed_up.doubtful:
        doubt = "which the machine's drift puts in doubt"
    step_s = cell.time_per_token.estimate * acceptance.length
    own = (
        plain.speed_up.estimate if plain and plain.speed_up else 1.0
    )  # what FP8 gives without a draft is not the draft's
    return Measured(k, acceptance, step_s, cell.speed_up.estimate / own, doubt)


def _decide(
    draft: Variant, measured: Sequence[Measured], plain_s: float, margin: float, task: str, point: str
) -> Decision:
    """The K with the largest expected speed-up among those measured, and for a chain all below the largest of them."""
    largest, chain = measured[-1], draft.algorithm in CHAINS
    known = {m.k: m.speed_up for m in measured}
    tried = dict(known)
    if chain:
        times = [plain_s, *(m.step_s for m in measured)]
        for k in range(1, largest.k):
            step_s = float(np.interp(k, [0, *known], times))
            length = largest.acceptance.truncated(k).length
            gain = (largest.step_s / step_s) * (length / largest.acceptance.length)
            tried.setdefault(k, largest.speed_up * gain)
    best = max(tried, key=lambda k: tried[k])
    pays = tried[best] > 1 + margin
    source = next((m for m in measured if m.k == best), largest)
    return Decision(
        variant=draft.name,
        task=task,
        point=point,
        best_k=best if pays else 0,
        expected_speedup=tried[best],
        measured=best in known,
        reason=_reason(best, tried[best], pays, best in known, chain, source, margin),
    )


def _reason(
    best: int, speed_up: float, pays: bool, was_measured: bool, chain: bool, source: Measured, margin: float
) -> str:
    how = "measured" if was_measured else f"predicted from K = {source.k} by cutting off its acceptance curve"
    if not pays:
        text = f"Do not speculate here: the best K, {best}, gives {speed_up:.2f}× ({how}), no more than the margin of "
        return text + f"{margin:.0%}."
    text = f"K = {best} gives {speed_up:.2f}× ({how})"
    if was_measured and source.doubt:
        text += f", {source.doubt}"
    if not chain:
        text += "; other K would have to be measured"
    return text + "."

"""A run in two sentences: does it pay here; and by how much, where most, where least."""

from collections.abc import Sequence

from bench.compare import ALL_TASKS, Comparison, Estimate
from bench.metrics import PointMetrics
from bench.records import BASELINE
from speculators.schema import Strict


class Cell(Strict):
    """One variant on one task: its metrics, the two quantities with intervals, and the comparison with the baseline.

    `marginal[i]` is the share of all steps that accepted position i, `conditional[i]` the share among the steps that
    accepted every position before.
    """

    task: str
    variant: str
    metrics: PointMetrics
    acceptance_length: Estimate | None
    time_per_token: Estimate | None
    speed_up: Comparison | None
    marginal: tuple[float | None, ...]
    conditional: tuple[float | None, ...]


def answer(cells: Sequence[Cell]) -> tuple[str, str]:
    """The two sentences, for the fastest variant over all tasks."""
    overall = [cell.speed_up for cell in cells if cell.task == ALL_TASKS and cell.speed_up]
    if not overall:
        return "No variant could be compared with the plain verifier.", "See below for what was skipped or failed."
    best = max(overall, key=lambda c: c.estimate)
    headline = _HEADLINES[best.verdict].format(best=best.variant, times=f"{best.estimate:.2f}")
    parts = [_figures(best, cells)]
    mine = [c.speed_up for c in cells if c.variant == best.variant and c.speed_up and c.task != ALL_TASKS]
    if len(mine) > 1:
        ordered = sorted(mine, key=lambda c: c.estimate)
        top, bottom = ordered[-1], ordered[0]
        parts.append(f"it does best on {_at(top.task, top)} and least well on {_at(bottom.task, bottom)}")
    others = [_at(c.variant, c) for c in overall if c is not best]
    if others:
        parts.append("over all tasks " + ", ".join(others[:-1]) + (" and " if others[:-1] else "") + others[-1])
    text = "; ".join(parts)
    return headline, text[:1].upper() + text[1:] + "."


_FAST = "decodes {times} times as fast as the plain verifier"
_HEADLINES = {
    "better": "Yes, it pays: {best} " + _FAST + ".",
    "worse": "No, it does not pay here: the best variant, {best}, " + _FAST + ".",
    "equivalent": "It makes no difference here: the best variant, {best}, " + _FAST + ".",
    "inconclusive": "Not settled yet: the best variant, {best}, " + _FAST.replace("decodes", "seems to decode") + ".",
}


def _figures(best: Comparison, cells: Sequence[Cell]) -> str:
    times = {c.variant: c.metrics.tpot_s.mean for c in cells if c.task == ALL_TASKS and c.metrics.tpot_s}
    few = f"{best.num_prompts} prompts are too few for an interval"
    known = f"95% interval {best.low:.2f} to {best.high:.2f} over {best.num_prompts} prompts" if best.low else few
    return f"{known}, {times[best.variant] * 1000:.1f} ms a token instead of {times[BASELINE] * 1000:.1f} ms"


def _at(name: str, comparison: Comparison) -> str:
    return f"{name} ({comparison.estimate:.2f}×)"

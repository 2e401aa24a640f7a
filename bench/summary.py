"""A run in two sentences: does it pay here; and by how much, where most, where least."""

from collections.abc import Sequence

from bench.buckets import Bucket
from bench.compare import ALL_TASKS, Comparison, Estimate
from bench.conditions import DEFAULT_POINT
from bench.metrics import PointMetrics
from speculators.schema import Strict


class Cell(Strict):
    """One variant on one task at one load: metrics, two quantities with intervals, comparison with the baseline.

    `marginal[i]` is the share of all steps that accepted position i, `conditional[i]` the share among the steps that
    accepted every position before. The buckets are empty where no request tells its steps in order.
    """

    task: str
    variant: str
    point: str = DEFAULT_POINT
    metrics: PointMetrics
    acceptance_length: Estimate | None
    time_per_token: Estimate | None
    speed_up: Comparison | None
    marginal: tuple[float | None, ...]
    conditional: tuple[float | None, ...]
    by_output_position: tuple[Bucket, ...] = ()
    by_context_length: tuple[Bucket, ...] = ()


def answer(all_cells: Sequence[Cell], points: Sequence[str]) -> tuple[str, str]:
    """The two sentences, for the fastest variant over all tasks at the first load; the others in passing."""
    cells = [cell for cell in all_cells if cell.point == points[0]]
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
    parts += _at_other_loads(best.variant, all_cells, points)
    others = [_at(c.variant, c) for c in overall if c is not best]
    if others:
        parts.append("over all tasks " + ", ".join(others[:-1]) + (" and " if others[:-1] else "") + others[-1])
    if best.verdict == "inconclusive" and best.prompts_needed:
        parts.append(f"about {best.prompts_needed} prompts would settle it")
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
    return f"{known}, {times[best.variant] * 1000:.1f} ms a token instead of {times[best.reference] * 1000:.1f} ms"


def _at_other_loads(variant: str, cells: Sequence[Cell], points: Sequence[str]) -> list[str]:
    at = {c.point: c.speed_up for c in cells if (c.variant, c.task) == (variant, ALL_TASKS) and c.speed_up}
    told = [f"{at[point].estimate:.2f}× at {load_name(point)}" for point in points[1:] if point in at]
    return [", ".join(told)] if told else []


def load_name(point: str) -> str:
    """A load point in words."""
    return f"concurrency {point[1:]}" if point.startswith("c") else f"{point[1:]} requests/s"


def _at(name: str, comparison: Comparison) -> str:
    return f"{name} ({comparison.estimate:.2f}×)"

"""What a reader must know before believing the numbers: skipped, failed, unequal, drifting or disturbed."""

from collections.abc import Sequence

from bench.compare import DRIFT_LIMIT, Drift
from bench.conditions import CLOSING_PASS, told
from bench.records import BASELINE, BenchRun, RequestRecord
from bench.summary import Cell, load_name

_LOAD_TOLERANCE_CORES = 0.2
_LOAD_TOLERANCE_SHARE = 0.05


def failures(records: Sequence[RequestRecord]) -> dict[str, int]:
    """How often each failure happened, by variant and task; prompts that were skipped are not among them."""
    counts: dict[str, int] = {}
    for record in records:
        if record.error and not record.skipped:
            label = f"{record.variant}, {record.task}: {record.error}"
            counts[label] = counts.get(label, 0) + 1
    return counts


def notes(run: BenchRun, cells: Sequence[Cell], drifts: Sequence[Drift], differences: Sequence[str]) -> list[str]:
    """All of them, the gravest first."""
    found = [f"UNEQUAL CONDITIONS, compared all the same (--force): {difference}." for difference in differences]
    for variant in run.variants:
        outcome = run.outcomes.get(variant.name)
        if outcome is None:
            found.append(f"{variant.name} was not finished; start the same bench again to continue.")
        elif outcome.status != "measured":
            found.append(
                f"{variant.name} {'was skipped' if outcome.status == 'skipped' else 'failed'}: {outcome.reason}"
            )
    found += [
        f"{point.variant}, {point.task}{_at(run, point.point)}: the requests' acceptance and the server's counters "
        f"differ: {told(point.requests)} against {told(point.counters)}"
        + (f" ({point.num_failed} requests failed and are in the counters only)." if point.num_failed else ".")
        for point in run.points
        if point.agrees is False and not point.refused
    ]
    last = {(p.variant, p.task, p.point, p.pass_index): p for p in run.points}  # a refused point is measured again
    found += [f"{p.variant}, {p.task}{_at(run, p.point)} is refused: {p.refused}" for p in last.values() if p.refused]
    found += drift_notes(drifts)
    found += load_notes(run)
    skipped = dict.fromkeys((p.task, prompt) for p in run.points for prompt in p.skipped)
    if skipped:
        listed = ", ".join(f"{task} {prompt}" for task, prompt in skipped)
        found.append(f"Skipped, because they do not fit the server's context: {listed}.")
    if any(cell.metrics.acceptance_from_counters for cell in cells):
        found.append("Acceptance comes from the server's counters alone, so it has no interval.")
    return found


def drift_notes(drifts: Sequence[Drift]) -> list[str]:
    """Loads at which the plain verifier was another one at the end."""
    return [
        f"Drift: at {load_name(d.point)} the plain verifier ({d.reference}) took {abs(d.ratio - 1):.1%} "
        f"{'more' if d.ratio > 1 else 'less'} time per token at the end of the run, beyond the limit of "
        f"{DRIFT_LIMIT:.0%}, so latency verdicts at this load are marked; measure again."
        for d in drifts
        if d.exceeded
    ]


def load_notes(run: BenchRun) -> list[str]:
    """Variants that had more or less of the machine to themselves than the baseline had."""
    loads = {variant.name: load for variant in run.variants if (load := _other_cores(run, variant.name)) is not None}
    base = loads.pop(BASELINE, None)
    allowed = max(_LOAD_TOLERANCE_CORES, _LOAD_TOLERANCE_SHARE * run.provenance.cores)
    return [
        f"{name}: other programs used {load:.1f} cores while it was measured and {base:.1f} during the baseline, so "
        "its latency and speed-up are in doubt; measure again on a quiet machine."
        for name, load in loads.items()
        if base is not None and abs(load - base) > allowed
    ]


def _other_cores(run: BenchRun, variant: str) -> float | None:
    points = [
        p for p in run.points if p.variant == variant and p.other_cores is not None and p.pass_index < CLOSING_PASS
    ]
    requests = sum(point.num_requests for point in points)
    return sum((p.other_cores or 0.0) * p.num_requests for p in points) / requests if requests else None


def _at(run: BenchRun, point: str) -> str:
    return f" at {load_name(point)}" if len(run.conditions.points) > 1 else ""

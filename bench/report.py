"""The report of a bench run: computed from `run.json`, `requests.jsonl` and predictions, so it can be made again.

`build` makes one `Report`; the HTML, Markdown, CSV and JSON files are renderings of it and compute nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from bench.answers import PREDICTED_DIRECTORY, read_predictions
from bench.audit import Losslessness, losslessness
from bench.compare import ALL_TASKS, Estimate, acceptance_length, speed_ups, time_per_token
from bench.metrics import PointMetrics, summarise
from bench.parity import Parity, parity
from bench.records import (
    BASELINE,
    BenchRun,
    Conditions,
    Outcome,
    Point,
    RequestRecord,
    TaskInfo,
    Variant,
    read_records,
)
from bench.summary import Cell, answer
from speculators.acceptance import Acceptance
from speculators.errors import UserError
from speculators.provenance import Provenance
from speculators.schema import Strict

SCHEMA_VERSION = 1
_LOAD_TOLERANCE_CORES = 0.2
_LOAD_TOLERANCE_SHARE = 0.05


class Report(Strict):
    """What `report.json` holds."""

    schema_version: int = SCHEMA_VERSION
    headline: str
    detail: str
    tasks: tuple[TaskInfo, ...]
    variants: tuple[Variant, ...]
    outcomes: dict[str, Outcome]
    cells: tuple[Cell, ...]
    losslessness: tuple[Losslessness, ...]
    parity: tuple[Parity, ...] = ()
    points: tuple[Point, ...]
    notes: tuple[str, ...]
    failures: dict[str, int]
    margin: float
    conditions: Conditions
    provenance: Provenance

    def cell(self, task: str, variant: str) -> Cell | None:
        """The cell of a task (or all tasks) and a variant; None where nothing was measured."""
        return next((cell for cell in self.cells if cell.task == task and cell.variant == variant), None)

    @property
    def measured(self) -> tuple[str, ...]:
        """Variants with at least one successful request, the baseline first."""
        names = {cell.variant for cell in self.cells if cell.metrics.num_requests > cell.metrics.num_failed}
        return tuple(variant.name for variant in self.variants if variant.name in names)

    @property
    def rows(self) -> tuple[str, ...]:
        """Task names, then the row over all of them if there are several."""
        names = tuple(task.name for task in self.tasks)
        return (*names, ALL_TASKS) if len(names) > 1 else names


class ReportOptions(Strict):
    """Render the report of a bench run again, from what it wrote down."""

    run: Path = Field(description="Directory of the bench run.", json_schema_extra={"argument": True})
    margin: float | None = Field(
        None, gt=0, lt=1, description="Differences below this share count as equivalent; by default as in the run."
    )
    json_output: bool = Field(
        False, description="Print the report as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )


def build(directory: Path, margin: float | None = None) -> Report:
    """Compute the report of a run directory.

    Raises:
        UserError: no run there, one without a successful request, or a prediction that cannot be read.
    """
    run = BenchRun.read(directory)
    records = read_records(directory)
    if not any(record.ok for record in records):
        raise UserError(f"{directory}: no request of this run succeeded, so there is nothing to report; see its logs.")
    margin = run.margin if margin is None else margin
    by_variant = {v.name: [r for r in records if r.variant == v.name] for v in run.variants}
    cells = [cell for v in run.variants for cell in _cells(v.name, by_variant, run, margin)]
    audits = _audits(run, by_variant) if run.conditions.temperature == 0 else []
    parities, parity_notes = _parities(directory, run, by_variant)
    headline, detail = answer(cells)
    if _load_notes(run):
        detail += " Other work on the machine puts these latencies in doubt, see below."
    return Report(
        headline=headline,
        detail=detail,
        tasks=run.tasks,
        variants=run.variants,
        outcomes=run.outcomes,
        cells=tuple(cells),
        losslessness=tuple(audits),
        parity=tuple(parities),
        points=run.points,
        notes=(*_notes(run, cells), *parity_notes),
        failures=_failures(records),
        margin=margin,
        conditions=run.conditions,
        provenance=run.provenance,
    )


def _cells(variant: str, by_variant: dict[str, list[RequestRecord]], run: BenchRun, margin: float) -> list[Cell]:
    mine = by_variant[variant]
    tasks = [task.name for task in run.tasks]
    good = [record for record in mine if record.ok]
    compared = (
        {c.task: c for c in speed_ups(good, by_variant[BASELINE], tasks, margin)}
        if variant != BASELINE and good
        else {}
    )
    cells = []
    for task in [*tasks, ALL_TASKS]:
        records = mine if task == ALL_TASKS else [record for record in mine if record.task == task]
        if not records:
            continue
        metrics = summarise(records, _counters(run, variant, task))
        rates = metrics.acceptance if metrics.acceptance and metrics.acceptance.steps else None
        cells.append(
            Cell(
                task=task,
                variant=variant,
                metrics=metrics,
                acceptance_length=acceptance_length(records, task, variant) or _from_counters(metrics, task, variant),
                time_per_token=time_per_token(records, task, variant),
                speed_up=compared.get(task),
                marginal=_numbers(rates.marginal) if rates else (),
                conditional=_numbers(rates.conditional) if rates else (),
            )
        )
    return cells


def _numbers(rates: Sequence[float]) -> tuple[float | None, ...]:
    """nan (no step came that far) as None, which JSON can hold."""
    return tuple(None if rate != rate else rate for rate in rates)


def _counters(run: BenchRun, variant: str, task: str) -> Acceptance | None:
    parts = [
        point.counters
        for point in run.points
        if point.variant == variant and task in (point.task, ALL_TASKS) and point.counters
    ]
    return sum(parts[1:], parts[0]) if parts else None


def _from_counters(metrics: PointMetrics, task: str, variant: str) -> Estimate | None:
    """Without per-request metrics there is a number but no interval."""
    if not metrics.acceptance or not metrics.acceptance.steps:
        return None
    return Estimate(
        metric="acceptance_length",
        task=task,
        variant=variant,
        estimate=metrics.acceptance.length,
        low=None,
        high=None,
        num_prompts=metrics.num_requests,
    )


def _audits(run: BenchRun, by_variant: dict[str, list[RequestRecord]]) -> list[Losslessness]:
    """Each variant against the plain server with the same weights: drafts on FP8 against `fp8`, if it was measured."""
    plain_fp8 = next((v.name for v in run.variants if v.fp8 and not v.draft), None)
    audits = []
    for variant in run.variants[1:]:
        against_fp8 = variant.fp8 and variant.draft and plain_fp8 and any(r.ok for r in by_variant[plain_fp8])
        audit = losslessness(by_variant[variant.name], by_variant[plain_fp8 if against_fp8 and plain_fp8 else BASELINE])
        if audit:
            audits.append(audit)
    return audits


def _parities(
    directory: Path, run: BenchRun, by_variant: dict[str, list[RequestRecord]]
) -> tuple[list[Parity], list[str]]:
    """Predictions beside what was served, in the order of the variants, and why a file there was left out."""
    predictions, strangers = read_predictions(directory, run.variants)
    notes = [f"{PREDICTED_DIRECTORY}/{name} is left out: no variant of this run is called so." for name in strangers]
    found = []
    for variant in run.variants:
        prediction = predictions.get(variant.name)
        if prediction is None:
            continue
        left_out = f"The prediction for {variant.name} is left out: "
        walked, served = prediction.total.num_speculative_tokens, variant.num_speculative_tokens
        made = parity(prediction, by_variant[variant.name], [task.name for task in run.tasks])
        if run.conditions.temperature > 0:
            notes.append(
                f"{left_out}it is about greedy answers, and temperature {run.conditions.temperature:g} was served."
            )
        elif served is not None and walked != served:
            notes.append(f"{left_out}it is for K = {walked}, and K = {served} was served.")
        elif made is None:
            notes.append(f"{left_out}it has no prompt in common with what was served.")
        else:
            found.append(made)
    return found, notes


def _failures(records: Sequence[RequestRecord]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error:
            label = f"{record.variant}, {record.task}: {record.error}"
            counts[label] = counts.get(label, 0) + 1
    return counts


def _notes(run: BenchRun, cells: Sequence[Cell]) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = []
    for variant in run.variants:
        outcome = run.outcomes.get(variant.name)
        if outcome is None:
            notes.append(f"{variant.name} was not finished; start the same bench again to continue.")
        elif outcome.status != "measured":
            notes.append(
                f"{variant.name} {'was skipped' if outcome.status == 'skipped' else 'failed'}: {outcome.reason}"
            )
    notes += [
        f"{point.variant}, {point.task}: the requests' acceptance and the server's counters differ: "
        f"{_told(point.requests)} against {_told(point.counters)}"
        + (f" ({point.num_failed} requests failed and are in the counters only)." if point.num_failed else ".")
        for point in run.points
        if point.agrees is False
    ]
    notes += _load_notes(run)
    if any(cell.metrics.acceptance_from_counters for cell in cells):
        notes.append("Acceptance comes from the server's counters alone, so it has no interval.")
    return notes


def _load_notes(run: BenchRun) -> list[str]:
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
    points = [p for p in run.points if p.variant == variant and p.other_cores is not None]
    requests = sum(point.num_requests for point in points)
    return sum((p.other_cores or 0.0) * p.num_requests for p in points) / requests if requests else None


def _told(acceptance: Acceptance | None) -> str:
    if acceptance is None:
        return "nothing"
    return f"{acceptance.accepted} of {acceptance.drafted} drafted tokens accepted in {acceptance.steps} steps"

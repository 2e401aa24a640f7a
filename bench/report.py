"""The report of a bench run: computed from `run.json`, `requests.jsonl` and predictions, so it can be made again.

`build` makes one `Report`; the HTML, Markdown, CSV and JSON files are renderings of it and compute nothing.
"""

from functools import cached_property
from pathlib import Path

from pydantic import Field

from bench.assemble import Rows, audits_of, cells_of, drifts_of, pairs, parities_of, plain_of
from bench.audit import Losslessness
from bench.compare import ALL_TASKS, Comparison, Drift
from bench.conditions import Conditions, Outcome, Point, TaskInfo, Variant
from bench.cost import BreakEven, Decision, StepTime, break_evens, decisions, step_times
from bench.merge import load
from bench.notes import drift_notes, failures, load_notes, notes
from bench.packed import no_collection
from bench.parity import Parity
from bench.schedule import Schedule, schedules
from bench.summary import Cell, answer
from speculators.errors import UserError
from speculators.provenance import Provenance
from speculators.schema import Strict

SCHEMA_VERSION = 2


class Report(Strict):
    """What `report.json` holds.

    Attributes:
        load_points: loads at which anything was measured, the first one being the one that the headline is about.
        comparisons: every two variants beside the baseline, with each other.
        decision, break_even, schedule: what to set, where speculation stops paying, what to set by batch size.
        step_times: the cost model behind these.
        forced: unequal conditions that were compared all the same.
        commands: what the runs were made with; none for other tools' results.
    """

    schema_version: int = SCHEMA_VERSION
    headline: str
    detail: str
    tasks: tuple[TaskInfo, ...]
    variants: tuple[Variant, ...]
    outcomes: dict[str, Outcome]
    load_points: tuple[str, ...]
    cells: tuple[Cell, ...]
    comparisons: tuple[Comparison, ...] = ()
    drift: tuple[Drift, ...] = ()
    losslessness: tuple[Losslessness, ...]
    parity: tuple[Parity, ...] = ()
    decision: tuple[Decision, ...] = ()
    break_even: tuple[BreakEven, ...] = ()
    schedule: tuple[Schedule, ...] = ()
    step_times: tuple[StepTime, ...] = ()
    points: tuple[Point, ...]
    notes: tuple[str, ...]
    failures: dict[str, int]
    forced: tuple[str, ...] = ()
    margin: float
    conditions: Conditions
    provenance: Provenance
    commands: tuple[str, ...] = ()

    @cached_property
    def _by_key(self) -> dict[tuple[str, str, str], Cell]:
        return {(cell.task, cell.variant, cell.point): cell for cell in self.cells}

    def cell(self, task: str, variant: str, point: str | None = None) -> Cell | None:
        """The cell of a task (or all tasks), a variant and a load (the first); None where nothing was measured."""
        return self._by_key.get((task, variant, self.load_points[0] if point is None else point))

    @property
    def measured(self) -> tuple[str, ...]:
        """Variants with at least one successful request, the baseline first."""
        names = {c.variant for c in self.cells if c.metrics.num_requests > c.metrics.num_failed + c.metrics.num_skipped}
        return tuple(variant.name for variant in self.variants if variant.name in names)

    @property
    def rows(self) -> tuple[str, ...]:
        """Task names, then the row over all of them if there are several."""
        names = tuple(task.name for task in self.tasks)
        return (*names, ALL_TASKS) if len(names) > 1 else names


class ReportOptions(Strict):
    """Render the report of a bench run again, from what it wrote down; several runs make one report."""

    run: tuple[str, ...] = Field(
        min_length=1,
        description="Directories of bench runs, or other tools' results as NAME=FILE (one of them named baseline): "
        "JSON of `vllm bench serve --save-detailed` or guidellm, JSONL of AIPerf.",
        json_schema_extra={"argument": True},
    )
    output: Path | None = Field(None, description="Where the files go; by default into the first run's directory.")
    force: bool = Field(False, description="Compare runs of unequal conditions all the same; the report says so.")
    margin: float | None = Field(
        None, gt=0, lt=1, description="Differences below this share count as equivalent; by default as in the run."
    )
    json_output: bool = Field(
        False, description="Print the report as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )


@no_collection()
def build(*sources: str | Path, margin: float | None = None, force: bool = False) -> Report:
    """Compute the report of a run directory, or of several runs as one.

    Raises:
        UserError: no run there, one without a successful request, unequal conditions without `force`, or a prediction
            that cannot be read.
    """
    loaded = load(sources, force)
    run, records = loaded.run, loaded.records
    if not any(record.ok for record in records):
        raise UserError(f"{sources[0]}: no request of this run succeeded, so there is nothing to report; see its logs.")
    margin = run.margin if margin is None else margin
    rows = Rows(loaded)
    drifts = drifts_of(rows)
    doubtful = {(d.reference, d.point) for d in drifts if d.exceeded}
    cells = [c for point in rows.points for v in run.variants for c in cells_of(v.name, point, rows, margin, doubtful)]
    plain = plain_of(rows)
    decision = decisions(run.variants, cells, plain, margin)
    parities, parity_notes = parities_of(rows)
    audits, audit_notes = audits_of(rows) if run.conditions.temperature == 0 else ([], [])
    headline, detail = answer(cells, rows.points)
    if load_notes(run) or drift_notes(drifts):
        detail += " Other work on the machine or drift puts these latencies in doubt, see below."
    if loaded.differences:
        detail += " Runs of UNEQUAL CONDITIONS were compared (--force), see below."
    return Report(
        headline=headline,
        detail=detail,
        tasks=run.tasks,
        variants=run.variants,
        outcomes=run.outcomes,
        load_points=rows.points,
        cells=tuple(cells),
        comparisons=tuple(pairs(rows, margin, doubtful)),
        drift=tuple(drifts),
        losslessness=tuple(audits),
        parity=tuple(parities),
        decision=tuple(decision),
        break_even=tuple(break_evens(decision)),
        schedule=tuple(schedules(decision, run.variants)),
        step_times=tuple(step_times(run.variants, cells, plain)),
        points=run.points,
        notes=(*notes(run, cells, drifts, loaded.differences), *audit_notes, *parity_notes),
        failures=failures(records),
        forced=loaded.differences,
        margin=margin,
        conditions=run.conditions,
        provenance=run.provenance,
        commands=loaded.commands,
    )

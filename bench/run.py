"""A whole bench run: one variant after another, each on a server of its own, continued if it was interrupted.

A variant that cannot be served is reported and the rest goes on; without a baseline there is nothing to compare, so
its failure ends the run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from bench.answers import write_answers
from bench.audit import Difference, closed_with
from bench.conditions import CLOSING_PASS, Point
from bench.margins import ask_margins, read_margins, to_ask
from bench.measure import measure, missing
from bench.plan_text import show_plan
from bench.records import (
    BASELINE,
    RUN_FILE,
    BenchRun,
    Conditions,
    Outcome,
    RecordWriter,
    Variant,
    finished_keys,
    read_records,
)
from bench.suite import BenchOptions, Plan, make_plan, server_spec
from bench.traffic import Finished
from serve.endpoint import Endpoint
from serve.quantize import quantize_fp8
from serve.vllm import running
from speculators.errors import UserError


def run_bench(options: BenchOptions, console: Console) -> BenchRun | None:
    """Measure what `options` ask for.

    Args:
        console: where the plan and the progress go (standard error).

    Returns:
        What `run.json` holds, None after a dry run.

    Raises:
        UserError: bad options, other conditions than the run in `--output` was made under, or a baseline that fails.
    """
    plan = make_plan(options)
    run = _continue(plan.run, options.output)
    finished = finished_keys(read_records(options.output))
    show_plan(plan, options, finished, console)
    if options.dry_run:
        return None
    run.write(options.output)
    with RecordWriter(options.output) as writer:
        job = _Job(plan, options, finished, writer, console)
        for variant in plan.variants:
            run = _run_variant(variant, run, job)
            run.write(options.output)
        run = _close(run, job)
    write_answers(options.output, run)
    return run


def _continue(run: BenchRun, output: Path) -> BenchRun:
    """`run` joined with what `output` holds from an earlier start."""
    if not (output / RUN_FILE).exists():
        return run
    earlier = BenchRun.read(output)
    _check_equal(earlier.conditions, run.conditions, output)
    known = {variant.name: variant for variant in earlier.variants}
    for variant in run.variants:
        old = known.get(variant.name)
        if old and _identity(old) != _identity(variant):
            raise UserError(
                f"--output: {output} holds {variant.name} measured with another draft or verifier "
                f"({old.draft or old.verifier}, now {variant.draft or variant.verifier}); give another --output."
            )
        known[variant.name] = variant
    points = tuple(dict.fromkeys((*earlier.conditions.points, *run.conditions.points)))
    return run.model_copy(
        update={
            "conditions": run.conditions.model_copy(update={"points": points}),
            "variants": tuple(known.values()),
            "outcomes": earlier.outcomes,
            "points": earlier.points,
        }
    )


def _check_equal(earlier: Conditions, now: Conditions, output: Path) -> None:
    for key in Conditions.model_fields:
        if key == "points":  # further load points may be added to a run
            continue
        seen, wanted = getattr(earlier, key), getattr(now, key)
        if seen != wanted:
            raise UserError(
                f"--output: {output} holds a run with other conditions ({key} was {seen}, now {wanted}), which cannot "
                "be compared; give another --output, or the same options."
            )


def _identity(variant: Variant) -> tuple[object, ...]:
    return variant.draft_revision, variant.fp8, variant.num_speculative_tokens, variant.algorithm, variant.url


class _Job(NamedTuple):
    """What every variant's measurement takes."""

    plan: Plan
    options: BenchOptions
    finished: Finished
    writer: RecordWriter
    console: Console

    def is_done(self, variant: Variant, pass_index: int) -> bool:
        return not any(missing(variant.name, self.plan, self.options.repeats, self.finished, pass_index))


def _run_variant(variant: Variant, run: BenchRun, job: _Job) -> BenchRun:
    if variant.skip_reason:
        name, reason = escape(variant.name), escape(variant.skip_reason)
        job.console.print(f"[yellow]{name} is skipped:[/yellow] {reason}", highlight=False)
        return _with_outcome(run, variant, Outcome(status="skipped", reason=variant.skip_reason))
    if job.is_done(variant, 0):
        return _with_outcome(run, variant, Outcome(status="measured"))
    points: list[Point] = []
    try:
        if variant.fp8:
            quantize_fp8(Path(run.conditions.verifier), Path(variant.verifier))
        _measure(variant, run, job, points)
    except UserError as error:
        if variant.name == BASELINE:
            raise
        job.console.print(f"[red]{escape(variant.name)} failed:[/red] {escape(str(error))}", highlight=False)
        return _with_outcome(_with_points(run, points), variant, Outcome(status="failed", reason=str(error)))
    return _with_outcome(_with_points(run, points), variant, Outcome(status="measured"))


def _close(run: BenchRun, job: _Job) -> BenchRun:
    """Plain verifiers once more: has the machine's speed changed, and how often do they leave their own output?"""
    measured = [v for v in job.plan.variants if run.outcomes[v.name].status == "measured"]
    if not job.options.closing_baseline or len(measured) < 2:
        return run
    for name in closed_with(measured, BASELINE):
        variant = next(v for v in measured if v.name == name)
        if job.is_done(variant, CLOSING_PASS) and not _unasked(variant, run, job):
            continue
        points: list[Point] = []
        try:
            _measure(variant, run, job, points, CLOSING_PASS)
        except UserError as error:
            where = escape(f"the closing pass of {name} failed:")
            job.console.print(f"[red]{where}[/red] {escape(str(error))}", highlight=False)
        run = _with_points(run, points)
        run.write(job.options.output)
    return run


def _unasked(variant: Variant, run: BenchRun, job: _Job) -> list[Difference]:
    """Where greedy outputs leave this plain server's, and it was not asked how nearly tied the tokens were."""
    if run.conditions.temperature > 0:
        return []
    output = job.options.output
    return to_ask(variant.name, run.variants, read_records(output), read_margins(output))


def _measure(variant: Variant, run: BenchRun, job: _Job, points: list[Point], pass_index: int = 0) -> None:
    """Fill `points`. Each is in `run.json` as soon as it is measured, so that an interruption loses no counters."""

    def keep(point: Point) -> None:
        points.append(point)
        _with_points(run, points).write(job.options.output)

    name = variant.file_name + ("-closing" if pass_index else "")
    with _serving(variant, job.options, job.options.output / "logs" / f"{name}.log") as endpoint:
        measure(endpoint, variant.name, job.plan, job.options, job.finished, job.writer, job.console, pass_index, keep)
        if pass_index == CLOSING_PASS and (differences := _unasked(variant, run, job)):
            told = ask_margins(endpoint, differences, job.options.output)
            job.console.print(f"{variant.name}: log-probabilities at {told} of {len(differences)} first differences.")


@contextmanager
def _serving(variant: Variant, options: BenchOptions, log: Path) -> Iterator[Endpoint]:
    """A server of the variant: started for the block, or the one that is running at its URL."""
    if variant.url:
        yield Endpoint.connect(variant.url)
        return
    with running(server_spec(variant, options), log_path=log) as endpoint:
        yield endpoint


def _with_points(run: BenchRun, points: Sequence[Point]) -> BenchRun:
    return run.model_copy(update={"points": (*run.points, *points)})


def _with_outcome(run: BenchRun, variant: Variant, outcome: Outcome) -> BenchRun:
    return run.model_copy(update={"outcomes": {**run.outcomes, variant.name: outcome}})

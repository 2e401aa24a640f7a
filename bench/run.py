"""A whole bench run: one variant after another, each on a server of its own, continued if it was interrupted.

A variant that cannot be served is reported and the rest goes on; without a baseline there is nothing to compare, so
its failure ends the run.
"""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bench.answers import write_answers
from bench.measure import Finished, measure, missing
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
    show_plan(plan, finished, console)
    if options.dry_run:
        return None
    run.write(options.output)
    with RecordWriter(options.output) as writer:
        for variant in plan.variants:
            run = _run_variant(variant, plan, run, options, finished, writer, console)
            run.write(options.output)
    write_answers(options.output, run)
    return run


def show_plan(plan: Plan, finished: Finished, console: Console) -> None:
    """Print which verifier and draft each name means, and how much there is to do."""
    console.print("[bold]Variants[/bold]")
    for variant in plan.variants:
        draft = f"{variant.draft} (K = {variant.num_speculative_tokens})" if variant.draft else "no draft"
        line = f"  {variant.name}: {draft}, verifier {variant.verifier}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    tasks = ", ".join(f"{name} ({len(prompts)})" for name, prompts in plan.prompts.items())
    console.print(f"[bold]Tasks[/bold] (prompts): {tasks}", highlight=False)
    per_variant = sum(prompt.num_turns for prompts in plan.prompts.values() for prompt in prompts)
    todo = [v for v in plan.variants if v.skip_reason is None]
    total = per_variant * plan.run.conditions.repeats * len(todo)
    names = {variant.name for variant in todo}
    done = sum(key.variant in names for key in finished)
    console.print(f"{total} requests, {done} of them there already.", highlight=False)


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
    return run.model_copy(
        update={
            "variants": tuple(known.values()),
            "outcomes": earlier.outcomes,
            "points": earlier.points,
        }
    )


def _check_equal(earlier: Conditions, now: Conditions, output: Path) -> None:
    for key in Conditions.model_fields:
        seen, wanted = getattr(earlier, key), getattr(now, key)
        if seen != wanted:
            raise UserError(
                f"--output: {output} holds a run with other conditions ({key} was {seen}, now {wanted}), which cannot "
                "be compared; give another --output, or the same options."
            )


def _identity(variant: Variant) -> tuple[object, ...]:
    return variant.draft_revision, variant.fp8, variant.num_speculative_tokens


def _run_variant(
    variant: Variant,
    plan: Plan,
    run: BenchRun,
    options: BenchOptions,
    finished: Finished,
    writer: RecordWriter,
    console: Console,
) -> BenchRun:
    if variant.skip_reason:
        console.print(
            f"[yellow]{escape(variant.name)} is skipped:[/yellow] {escape(variant.skip_reason)}", highlight=False
        )
        return _with_outcome(run, variant, Outcome(status="skipped", reason=variant.skip_reason))
    if not any(missing(variant.name, plan, options.repeats, finished)):
        return _with_outcome(run, variant, Outcome(status="measured"))
    try:
        if variant.fp8:
            quantize_fp8(Path(run.conditions.verifier), Path(variant.verifier))
        spec = server_spec(variant, options)
        log = options.output / "logs" / f"{variant.file_name}.log"
        with running(spec, log_path=log) as endpoint:
            points = measure(endpoint, variant.name, plan, options, finished, writer, console)
    except UserError as error:
        if variant.name == BASELINE:
            raise
        console.print(f"[red]{escape(variant.name)} failed:[/red] {escape(str(error))}", highlight=False)
        return _with_outcome(run, variant, Outcome(status="failed", reason=str(error)))
    run = run.model_copy(update={"points": (*run.points, *points)})
    return _with_outcome(run, variant, Outcome(status="measured"))


def _with_outcome(run: BenchRun, variant: Variant, outcome: Outcome) -> BenchRun:
    return run.model_copy(update={"outcomes": {**run.outcomes, variant.name: outcome}})

"""What a bench is going to do, printed before it starts: what each name means, how much there is, how long it takes."""

import json
from pathlib import Path

from rich.console import Console

from bench import prefix_cache
from bench.audit import closed_with
from bench.conditions import CLOSING_PASS
from bench.duration import duration
from bench.measure import missing
from bench.records import BASELINE, Variant
from bench.suite import BenchOptions, Plan, untrained_speculation
from bench.traffic import Finished
from serve.program import find


def show_plan(plan: Plan, options: BenchOptions, finished: Finished, console: Console) -> None:
    """Print which verifier and draft each name means, the load, the requests left and their time."""

    def line(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    console.print("[bold]Variants[/bold]")
    for variant in plan.variants:
        line(f"  {variant.name}: {resolved(variant)}")
    console.print("[bold]Tasks[/bold] (prompts)", end=": ")
    line(", ".join(f"{name} ({len(prompts)})" for name, prompts in plan.prompts.items()))
    console.print("[bold]Load[/bold]", end=": ")
    line(", ".join(load.name for load in plan.loads) + " (c: requests in flight, r: arrivals a second)")
    for load in plan.loads:
        few = [name for name, prompts in plan.prompts.items() if len(prompts) < (load.concurrency or 0)]
        if few:
            line(
                f"  {', '.join(few)}: fewer prompts than {load.name} has streams, so some stay idle; see --num-prompts."
            )
    todo = {v.name: list(missing(v.name, plan, options.repeats, finished)) for v in plan.variants if not v.skip_reason}
    if options.closing_baseline and len(todo) > 1:
        for name in closed_with([v for v in plan.variants if v.name in todo], BASELINE):
            again = missing(name, plan, options.repeats, finished, CLOSING_PASS)
            todo[f"{name}, at the end again"] = list(again)
    started = [keys for keys in todo.values() if keys]
    keys = [key for some in started for key in some]
    known = {variant.name for variant in plan.variants}
    done = sum(key.variant in known for key in finished)
    line(f"{len(keys) + done} requests, {done} of them there already.")
    own = {v.name for v in plan.variants if not v.url}
    time = duration(
        keys,
        sum(some[0].variant in own for some in started),
        finished.values(),
        Path(plan.variants[0].verifier),
        find(options.vllm) if own else None,
        options.max_tokens,
        options.enforce_eager,
    )
    line(f"Time: {time}.")


def resolved(variant: Variant) -> str:
    """What a name stands for, in words."""
    if variant.url:
        there = f"{variant.verifier} at {variant.url}, which is running already"
        return f"{there}; prefix cache {prefix_cache.SALTED}"
    draft = "no draft"
    if variant.draft:
        draft = f"{variant.draft} (K = {variant.num_speculative_tokens})"
    elif speculation := untrained_speculation(variant):
        draft = f"no draft, --speculative-config '{json.dumps(speculation)}'"
    skipped = "; will be skipped" if variant.skip_reason else ""
    return f"{draft}, verifier {variant.verifier}{skipped}"

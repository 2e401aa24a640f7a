"""Where the time of a training step goes: torch.profiler's operators of whole steps, one thread, real shapes.

    python benchmarks/profile_training.py --data output/data --hidden-states output/hidden_states \
        --verifier output/verifier --speculator-type dflash

Profiled is the trainer's own step (forward, loss, backward, clipping, optimizer) after warm-up steps, so nothing is
left out and nothing is mocked. Phases are wall time without the profiler. The trap: the profiler slows operators that
are many and small, so shares of those are upper bounds.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from drivers import run_script
from pydantic import Field
from rich.console import Console
from rich.table import Table
from training_job import Algorithm, Job

from speculators.cli.options import schema_command
from speculators.schema import Strict


class ProfileOptions(Strict):
    """Profile training steps and print the operators that take the most time."""

    data: Path = Field(description="Data directory made by `speculators prepare`.")
    hidden_states: Path = Field(description="Cache made by `speculators extract`.")
    verifier: str = Field(description="Directory of the verifier.")
    speculator_type: Algorithm = Field(description="eagle3 or dflash.")
    steps: int = Field(4, ge=1, description="Steps profiled, after as many for warm-up.")
    top: int = Field(15, ge=1, description="Operators shown.")
    shapes: bool = Field(False, description="One line for each operator and input shape.")
    row_length: int = Field(1024, ge=16, description="Tokens of a packed row.")
    max_anchors: int = Field(128, ge=1, description="dflash: blocks of a row.")
    draft_vocab_size: int = Field(8192, ge=1, description="Tokens the draft can propose.")
    threads: int = Field(1, ge=1, description="Threads of torch.")


class Operator(NamedTuple):
    """One line: self time in ms a step, share of all self time, calls a step, input shapes."""

    name: str
    ms: float
    share: float
    calls: float
    shapes: str


def profile(options: ProfileOptions) -> tuple[dict[str, float], list[Operator]]:
    """(seconds a step by phase, operators by falling self time)."""
    import torch
    from own_driver import options_of
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    from speculators.training import launch
    from speculators.training.optim import Optimizers
    from speculators.training.trainer import Trainer

    torch.set_num_threads(options.threads)
    phases = _Phases()
    Trainer._forward_backward = phases.timed("forward and backward", Trainer._forward_backward)  # type: ignore[method-assign]
    Optimizers.step = phases.timed("optimizer", Optimizers.step)  # type: ignore[method-assign]
    recorded = profiler(activities=[ProfilerActivity.CPU], record_shapes=options.shapes)
    step, seen = Trainer._take_step, 0

    def one_step(*arguments: Any) -> None:
        nonlocal seen
        if seen == options.steps:
            phases.seconds.clear()
        if seen == 2 * options.steps:
            phases.done = True
            recorded.start()
        started = time.perf_counter()
        step(*arguments)
        phases.add("whole step", time.perf_counter() - started)
        seen += 1
        if seen == 3 * options.steps:
            recorded.stop()

    Trainer._take_step = one_step  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="profile-") as directory:
        launch.train(options_of(_job(options, directory)))
    averages = recorded.key_averages(group_by_input_shape=options.shapes)
    total = sum(event.self_cpu_time_total for event in averages)
    operators = [
        Operator(
            name=event.key,
            ms=event.self_cpu_time_total / 1000 / options.steps,
            share=event.self_cpu_time_total / total,
            calls=event.count / options.steps,
            shapes=str(event.input_shapes) if options.shapes else "",
        )
        for event in sorted(averages, key=lambda event: -event.self_cpu_time_total)
    ]
    return {name: seconds / options.steps for name, seconds in phases.seconds.items()}, operators


class _Phases:
    """Adds up the seconds of named phases until `done`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.done = False

    def add(self, name: str, seconds: float) -> None:
        if not self.done:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed_work(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = work(*arguments)
            self.add(name, time.perf_counter() - started)
            return result

        return timed_work


def _job(options: ProfileOptions, directory: str) -> Job:
    dflash = options.speculator_type == "dflash"
    return Job(
        algorithm=options.speculator_type,
        verifier=options.verifier,
        data=str(options.data),
        hidden_states=str(options.hidden_states),
        rows="",
        output=os.path.join(directory, "run"),
        steps=3 * options.steps + 1,  # the last one also saves
        row_length=options.row_length,
        draft_vocab_size=options.draft_vocab_size,
        num_layers=2 if dflash else 1,
        max_anchors=options.max_anchors,
    )


def run(options: ProfileOptions) -> None:
    """Profile and print."""
    phases, operators = profile(options)
    console = Console(width=160, highlight=False)
    title = f"{options.speculator_type}: row {options.row_length}, vocabulary {options.draft_vocab_size}"
    shown = Table("operator", "ms a step", "share", "calls a step", "shapes", title=title)
    for operator in operators[: options.top]:
        shown.add_row(
            operator.name, f"{operator.ms:.1f}", f"{operator.share:.1%}", f"{operator.calls:.0f}", operator.shapes
        )
    console.print(shown)
    console.print("; ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in phases.items()))


if __name__ == "__main__":
    run_script("profile_training.py", schema_command(ProfileOptions, run))

"""`speculators train --dry-run`: what the run would be and need, with nothing written and no weight made."""

import os
from typing import Any

import numpy as np

from speculators.data.packing import pack_rows
from speculators.doctor import Facts, check_before_training, gather
from speculators.doctor_facts import gib
from speculators.doctor_states import free_bytes, run_memory
from speculators.schema import Strict
from speculators.training import estimate
from speculators.training.optim import resolve_hyper
from speculators.training.options import TrainOptions


class DryRun(Strict):
    """A run before it is started. Sizes in bytes; `tokens` are of one pass over the data, real ones.

    Attributes:
        options: every option, those left open with the value that the run would use.
        parts: trained weights by part of the draft.
        disk_bytes: all checkpoints that are kept, and the one being written.
    """

    options: dict[str, Any]
    num_speculative_tokens: int
    trained_weights: int
    parts: dict[str, int]
    memory: estimate.Memory
    memory_bytes: int
    memory_formula: str
    checkpoint_bytes: int
    checkpoints: int
    disk_bytes: int
    disk_free_bytes: int
    rows: int
    fullness: float
    tokens: int
    supervised_tokens: int
    steps_per_epoch: int
    total_steps: int


def dry_run(options: TrainOptions) -> DryRun:
    """Everything that follows from options, data and shapes.

    Raises:
        UserError: what would stop the run before its first step.
    """
    facts = gather(options)
    check_before_training(facts)
    config = facts.config
    assert config  # what stood against it was an error of the checks
    lengths = _usable_lengths(facts)
    rows = pack_rows(lengths, options.row_length, options.seed)
    world = int(os.environ.get("WORLD_SIZE", 1))
    size = estimate.checkpoint_bytes(config, resolve_hyper(options, config).optimizer)
    steps = estimate.total_steps(len(rows), options, world)
    kept = estimate.checkpoints_kept(options, steps)
    needed = run_memory(facts)
    return DryRun(
        options=_resolved(facts, steps),
        num_speculative_tokens=config.num_speculative_tokens,
        trained_weights=sum(estimate.parts(config).values()),
        parts=estimate.parts(config),
        memory=needed,
        memory_bytes=needed.total_bytes,
        memory_formula=estimate.MEMORY_FORMULA,
        checkpoint_bytes=size,
        checkpoints=kept,
        disk_bytes=kept * size,
        disk_free_bytes=free_bytes(options.output),
        rows=len(rows),
        fullness=int(lengths.sum()) / (options.row_length * max(1, len(rows))),
        tokens=int(lengths.sum()),
        supervised_tokens=facts.data.manifest.splits["train"].supervised_tokens,
        steps_per_epoch=estimate.steps_per_epoch(len(rows), options, world),
        total_steps=steps,
    )


def show(options: TrainOptions) -> None:
    """Print it on stdout, as JSON if asked to; under torchrun on the first rank alone."""
    run = dry_run(options)
    if int(os.environ.get("RANK", 0)):
        return
    if options.json_output:
        print(run.model_dump_json(indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("dry run", "", box=SIMPLE_HEAD)
    for name, value in run.options.items():
        shown = ",".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)
        table.add_row(f"--{name.replace('_', '-')}", Text(shown))
    table.add_section()
    for name, sentence in _lines(run):
        table.add_row(name, Text(sentence))
    Console(highlight=False).print(table)


def _lines(run: DryRun) -> list[tuple[str, str]]:
    named = ", ".join(f"{part} {count:,}" for part, count in run.parts.items())
    bytes_of = ", ".join(f"{name.removesuffix('_bytes')} {gib(size)}" for name, size in run.memory.model_dump().items())
    return [
        ("draft", f"{run.trained_weights:,} trained weights ({named}), K = {run.num_speculative_tokens}"),
        ("memory", f"about {gib(run.memory_bytes)} ({bytes_of})"),
        ("memory formula", run.memory_formula),
        ("disk", f"{run.checkpoints} checkpoints of {gib(run.checkpoint_bytes)} make {gib(run.disk_bytes)}, "
                 f"{gib(run.disk_free_bytes)} are free"),
        ("data", f"{run.tokens:,} tokens in {run.rows} rows, {run.fullness:.1%} full; "
                 f"{run.supervised_tokens:,} of them supervised"),
        ("steps", f"{run.total_steps} of {run.steps_per_epoch} a pass over the data"),
    ]  # fmt: skip


def _usable_lengths(facts: Facts) -> np.ndarray:
    """int64: tokens of each training sample that has a target, as they are packed."""
    samples = facts.data.split("train")
    return samples.lengths[[i for i, sample in enumerate(samples) if sample.loss_mask[1:].any()]]


def _resolved(facts: Facts, steps: int) -> dict[str, Any]:
    """The options; None is replaced by what draft, recipe or length of the run make of it."""
    options, config = facts.options, facts.config
    assert config
    every = estimate.default_every(steps)
    made = {**config.model_dump(mode="json"), **resolve_hyper(options, config)._asdict()}
    made |= {"validate_every": every, "save_every": every}
    if "block_size" in made:
        made["loss_decay_gamma"] = options.decay_gamma(made["block_size"])
    values = options.model_dump(mode="json")
    return {name: made.get(name) if value is None else value for name, value in values.items()}

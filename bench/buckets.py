"""Acceptance length by where in the output a step began, and by how long the context was then.

Needs the steps in order (`accepted_per_step`). The trap: later buckets hold only prompts with long answers, so a change
along the output may be a change of prompts.
"""

from collections.abc import Iterable

import numpy as np

from bench.records import RequestRecord
from speculators.schema import Strict

OUTPUT_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CONTEXT_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Bucket(Strict):
    """Steps that began at `low` <= position < `high` (None: no upper end)."""

    low: int
    high: int | None
    steps: int
    acceptance_length: float


def by_output_position(records: Iterable[RequestRecord]) -> tuple[Bucket, ...]:
    """By the number of output tokens that were there when a step began; empty when no request tells its steps."""
    return _buckets(((record.accepted_per_step, 1) for record in records if record.ok), OUTPUT_EDGES)


def by_context_length(records: Iterable[RequestRecord]) -> tuple[Bucket, ...]:
    """By the tokens of prompt and output together when a step began."""
    return _buckets(
        (
            (record.accepted_per_step, 1 + record.prompt_tokens)
            for record in records
            if record.ok and record.prompt_tokens is not None
        ),
        CONTEXT_EDGES,
    )


def _buckets(runs: Iterable[tuple[tuple[int, ...], int]], edges: tuple[int, ...]) -> tuple[Bucket, ...]:
    """Count steps and accepted tokens; a run is one request's steps and the position at which the first began.

    The first output token comes from the prompt's own pass, before any step; a step adds what it accepted and a bonus.
    """
    kept = [(steps, start) for steps, start in runs if len(steps)]
    if not kept:
        return ()
    accepted = np.concatenate([np.asarray(steps, dtype=np.int64) for steps, _ in kept])
    sizes = np.array([len(steps) for steps, _ in kept])
    before = np.cumsum(accepted + 1) - (accepted + 1)
    first = np.cumsum(sizes) - sizes
    positions = before + np.repeat(np.array([start for _, start in kept]) - before[first], sizes)
    index = np.searchsorted(np.array(edges), positions, side="right") - 1
    steps = np.bincount(index, minlength=len(edges))
    total = np.bincount(index, weights=accepted, minlength=len(edges))
    return tuple(
        Bucket(
            low=edges[i],
            high=edges[i + 1] if i + 1 < len(edges) else None,
            steps=int(steps[i]),
            acceptance_length=float(1 + total[i] / steps[i]),
        )
        for i in range(len(edges))
        if steps[i]
    )

"""A schedule of speculative tokens by batch size, where the best number changes with the load.

vLLM reads one as `num_speculative_tokens_per_batch_size` (vllm/v1/spec_decode/dynamic/utils.py). The trap: under a
schedule a block draft drafts its whole block and cuts it off, which is not how a smaller K of it was measured.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from bench.compare import ALL_TASKS
from bench.conditions import Variant
from bench.cost import CHAINS, Decision, only_task
from speculators.schema import Strict


class Schedule(Strict):
    """How many tokens to draft at which batch size: vLLM's `num_speculative_tokens_per_batch_size`.

    Attributes:
        ranges: first batch size, last one, K (0: none); beyond the last range vLLM goes on with its K.
    """

    variant: str
    task: str
    ranges: tuple[tuple[int, int, int], ...]


def schedules(found: Sequence[Decision], variants: Sequence[Variant]) -> list[Schedule]:
    """For each draft whose best K changes with the concurrency; in between, the nearer one (in the logarithm) counts.

    For a block draft only switching off is scheduled.
    """
    chains = {variant.name for variant in variants if variant.algorithm in CHAINS}
    rows = []
    for variant, task in dict.fromkeys((d.variant, d.task) for d in found if d.task == ALL_TASKS or only_task(found)):
        mine = [d for d in found if (d.variant, d.task) == (variant, task) and d.point.startswith("c")]
        best = sorted((int(d.point[1:]), d.best_k) for d in mine)
        drafting = {k for _, k in best if k}
        if drafting and len({k for _, k in best}) > 1 and (variant in chains or len(drafting) == 1):
            rows.append(Schedule(variant=variant, task=task, ranges=_ranges(best)))
    return rows


def _ranges(best: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Ranges of equal K out of (concurrency, K), in ascending order of concurrency."""
    ends = [math.isqrt(low * high) for (low, _), (high, _) in pairwise(best)] + [best[-1][0]]
    ranges: list[tuple[int, int, int]] = []
    for end, (_, k) in zip(ends, best, strict=True):
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], end, k)
        else:
            ranges.append((ranges[-1][1] + 1 if ranges else 1, end, k))
    return tuple(ranges)

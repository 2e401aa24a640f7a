"""Is a draft-served text the plain verifier's? Greedy answers up to near-ties, samples by a two-sample test.

The traps: bfloat16 kernels round otherwise in batches of another shape, so that two tokens which are nearly equally
likely may change places, and after the first such place two texts go their own ways. And equal seeds would give both
servers the same samples: they must be drawn with different ones.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from bench.audit import first_difference

NEAR_TIE = 0.5  # in log-probability; a bfloat16 logit of 16 to 32 is known to 0.125, the sum before it to less
_RARE = 20  # outcomes that both samples together show less often are taken as one
_RANDOM_SPLITS = 20_000


class Greedy(NamedTuple):
    """A greedy answer: its tokens, and at each of them what the likeliest tokens' log-probabilities were."""

    token_ids: list[int]
    likeliest: list[dict[int, float]]


def unexplained_difference(served: Sequence[int], reference: Greedy) -> str | None:
    """None when the answers are equal, or first differ where the served token is a near-tie of the reference's."""
    at = first_difference(list(served), reference.token_ids)
    if at is None:
        return None
    if at >= min(len(served), len(reference.token_ids)):
        return f"one answer ends at token {at}, the other goes on"
    likeliest = reference.likeliest[at]
    behind = max(likeliest.values()) - likeliest.get(served[at], -np.inf)
    return None if behind <= NEAR_TIE else f"token {at} is {served[at]}, {behind:.2f} behind {reference.token_ids[at]}"


def two_sample_p(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """How often a random split of both samples' values differs as much as the given one: a permutation test.

    The statistic is chi-square of the counts by outcome, rare outcomes pooled; a random split's counts are multivariate
    hypergeometric, so no values are moved.
    """
    outcomes = sorted({*first, *second}, key=repr)
    counts = np.array([[sample.count(outcome) for outcome in outcomes] for sample in (list(first), list(second))])
    rare = counts.sum(axis=0) < _RARE
    counts = np.hstack([counts[:, ~rare], counts[:, rare].sum(axis=1, keepdims=True)])
    totals = counts.sum(axis=0)
    splits = np.random.default_rng(0).multivariate_hypergeometric(totals, len(first), size=_RANDOM_SPLITS)
    share = len(first) / (len(first) + len(second))
    expected = np.maximum(totals * share, 1e-9)

    def statistic(of_first: np.ndarray) -> np.ndarray:
        return ((of_first - totals * share) ** 2 / expected).sum(axis=-1)

    return float((1 + (statistic(splits) >= statistic(counts[0]) - 1e-9).sum()) / (1 + _RANDOM_SPLITS))

"""How sure a number is: a cluster bootstrap by prompt, studentised, seeded; two-way clusters for latency under load.

Every quantity here is made of sums over prompts (a mean is a ratio with denominators of 1). Requests of one prompt are
one cluster: they are not independent. The plain percentile bootstrap is too narrow below some 50 prompts; dividing each
resample by its own standard error repairs that (Efron & Tibshirani 1993, chapter 12; Hesterberg 2015).
"""

from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
MIN_CLUSTERS = 5
_RESAMPLES = 4000
_MAX_BOOTSTRAP = 500  # clusters; above, Student's t is as good (tests compare them) and far cheaper
_T_DRAWS = 100_000
_POWER = 0.8


class Interval(NamedTuple):
    """An estimate with its 95 % interval, and what a test against any null value needs.

    Attributes:
        estimate: the statistic of all clusters.
        low, high: interval ends; nan below `MIN_CLUSTERS` clusters.
        error: standard error of the estimate.
        studentised: float [resamples], (resample - estimate) / its standard error, sorted.
        num_clusters: prompts, or groups of prompts under load.
    """

    estimate: float
    low: float
    high: float
    error: float
    studentised: np.ndarray
    num_clusters: int

    def p_value(self, null: float) -> float:
        """Two-sided p-value of "the true value is `null`"; it falls below 0.05 where the interval leaves `null` out."""
        if not len(self.studentised):
            return 1.0
        if self.error == 0:
            return 1.0 if self.estimate == null else 0.0
        observed = (self.estimate - null) / self.error
        below = (np.searchsorted(self.studentised, observed, side="right") + 1) / (len(self.studentised) + 1)
        above = (len(self.studentised) - np.searchsorted(self.studentised, observed, side="left") + 1) / (
            len(self.studentised) + 1
        )
        return float(min(1.0, 2 * min(below, above)))


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray | None = None, seed: int = 0) -> Interval:
    """95 % interval of sum(numerators) / sum(denominators).

    Args:
        numerators: float [n], one entry a prompt (its requests summed).
        denominators: float [n], positive; None means ones, so that the ratio is the mean.
        seed: of the resampling; equal input and seed give equal output.
    """
    x = np.asarray(numerators, dtype=np.float64)
    y = np.ones_like(x) if denominators is None else np.asarray(denominators, dtype=np.float64)
    n = len(x)
    if n == 0:
        return _nothing()
    values, errors = _standard_error(np.ones((1, n)), x, y)
    estimate, error = float(values[0]), float(errors[0])
    if n < MIN_CLUSTERS:
        return Interval(estimate, float("nan"), float("nan"), float("nan"), np.zeros(0), n)
    if error <= 1e-12 * max(1.0, abs(estimate)):
        return Interval(estimate, estimate, estimate, 0.0, np.zeros(1), n)
    if n > _MAX_BOOTSTRAP:
        return _student(estimate, error, n - 1.0, n, seed)
    values, errors = _standard_error(_weights(n, seed), x, y)
    kept = errors > 1e-12 * np.maximum(1.0, np.abs(values))  # a resample of one prompt alone tells no spread
    return _from_studentised(estimate, error, np.sort((values[kept] - estimate) / errors[kept]), n)


def crossed_interval(values: np.ndarray, groups: np.ndarray, repeats: np.ndarray, seed: int = 0) -> Interval:
    """95 % interval of the mean of values that depend on each other in two ways: by group of prompts and by repeat.

    Requests that run together share a batch, so a prompt alone is no cluster under load: neighbours in the order of
    sending are a group, and a repeat moves all of its requests. The variance is V_group + V_repeat - V_cell (Cameron,
    Gelbach & Miller 2011, eq. 2.11), never below V_group; the quantile is Student's with Satterthwaite's degrees of
    freedom. One repeat alone tells nothing about the next one: then only groups count.

    Args:
        values: float [n], such as log ratios of single requests.
        groups, repeats: int [n], which group and which repeat each value belongs to.
    """
    values = np.asarray(values, dtype=np.float64)
    if not len(values):
        return _nothing()
    deviations = values - values.mean()
    by_group, num_groups = _cluster_variance(deviations, groups)
    if num_groups < MIN_CLUSTERS:
        return Interval(float(values.mean()), float("nan"), float("nan"), float("nan"), np.zeros(0), num_groups)
    variance, freedom = by_group, num_groups - 1.0
    by_repeat, num_repeats = _cluster_variance(deviations, repeats)
    if num_repeats > 1:
        by_cell, _ = _cluster_variance(deviations, np.asarray(groups) * (int(np.max(repeats)) + 1) + repeats)
        extra = by_repeat - by_cell
        if extra > 0:
            variance = by_group + extra
            freedom = variance**2 / (by_group**2 / (num_groups - 1) + extra**2 / (num_repeats - 1))
    return _student(float(values.mean()), float(np.sqrt(variance)), freedom, num_groups, seed)


def prompts_to_settle(interval: Interval, margin: float, comparisons: int = 1) -> float | None:
    """By which factor more prompts would settle a comparison of logarithms with 80 % probability.

    Either the difference becomes significant, or the whole interval comes to lie within ln(1 + margin) of 0, whichever
    needs less; a difference equal to the margin is settled by neither soon.

    Args:
        interval: of a difference of logarithms (0 means none).
        comparisons: size of the family of hypotheses (Bonferroni's share of the 5 % is assumed).

    Returns:
        At least 1; None without an interval.
    """
    if not interval.error > 0:
        return None
    normal, half = NormalDist(), float(np.log1p(margin))
    reach = normal.inv_cdf(1 - (1 - LEVEL) / 2 / max(1, comparisons)) + normal.inv_cdf(_POWER)
    within = (normal.inv_cdf((1 + LEVEL) / 2) + normal.inv_cdf((1 + _POWER) / 2)) / max(
        half - abs(interval.estimate), 1e-9
    )
    different = reach / max(abs(interval.estimate), 1e-9)
    return max(1.0, (min(different, within) * interval.error) ** 2)


def holm(p_values: list[float], alpha: float = 1 - LEVEL) -> list[bool]:
    """Which hypotheses of a family are rejected, the chance of any false rejection kept below `alpha` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def _standard_error(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and its linearised standard error for each row of `weights` [B, n]."""
    n = len(x)
    total_y = weights @ y
    ratio = (weights @ x) / total_y
    squares = weights @ (x * x) - 2 * ratio * (weights @ (x * y)) + ratio**2 * (weights @ (y * y))
    variance = np.maximum(squares, 0.0) / max(1, n - 1) * n / total_y**2
    return ratio, np.sqrt(variance)


@lru_cache(maxsize=4)
def _weights(n: int, seed: int) -> np.ndarray:
    """How often each of n clusters was drawn, float [resamples, n]."""
    drawn = np.random.default_rng(seed).integers(0, n, size=(_RESAMPLES, n))
    flat = np.bincount((drawn + n * np.arange(_RESAMPLES)[:, None]).ravel(), minlength=_RESAMPLES * n)
    return flat.reshape(_RESAMPLES, n).astype(np.float64)


def _cluster_variance(deviations: np.ndarray, clusters: np.ndarray) -> tuple[float, int]:
    """Variance of the mean under clusters of dependent values, and the number of clusters."""
    _, index = np.unique(clusters, return_inverse=True)
    sums = np.bincount(index, weights=deviations)
    count = len(sums)
    return float((sums**2).sum()) / len(deviations) ** 2 * count / max(1, count - 1), count


def _student(estimate: float, error: float, freedom: float, num_clusters: int, seed: int) -> Interval:
    if error <= 1e-12 * max(1.0, abs(estimate)):
        return Interval(estimate, estimate, estimate, 0.0, np.zeros(1), num_clusters)
    return _from_studentised(estimate, error, _student_draws(round(freedom, 1), seed), num_clusters)


@lru_cache(maxsize=16)
def _student_draws(freedom: float, seed: int) -> np.ndarray:
    """A symmetric sample of Student's distribution, sorted: its quantiles without a dependency on scipy."""
    drawn = np.abs(np.random.default_rng(seed).standard_t(freedom, _T_DRAWS // 2))
    return np.sort(np.concatenate([-drawn, drawn]))


def _from_studentised(estimate: float, error: float, studentised: np.ndarray, num_clusters: int) -> Interval:
    tail = (1 - LEVEL) / 2
    lower, upper = np.quantile(studentised, [tail, 1 - tail])
    return Interval(estimate, estimate - upper * error, estimate - lower * error, error, studentised, num_clusters)


def _nothing() -> Interval:
    return Interval(float("nan"), float("nan"), float("nan"), float("nan"), np.zeros(0), 0)

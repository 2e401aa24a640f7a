"""How sure a number is: a cluster bootstrap by prompt, studentised, seeded.

Every quantity here is a ratio of sums over prompts (a mean is one with denominators of 1). Requests of one prompt are
one cluster: they are not independent. The plain percentile bootstrap is too narrow below some 50 prompts; dividing each
resample by its own standard error repairs that (Efron & Tibshirani 1993, chapter 12; Hesterberg 2015).
"""

from typing import NamedTuple

import numpy as np

LEVEL = 0.95
MIN_CLUSTERS = 5
_RESAMPLES = 4000
_CHUNK_ELEMENTS = 4_000_000


class Interval(NamedTuple):
    """An estimate with its 95 % interval, and what a test against any null value needs.

    Attributes:
        estimate: the ratio of sums.
        low, high: interval ends; nan below `MIN_CLUSTERS` prompts.
        error: standard error of the estimate.
        studentised: float [resamples], (resample - estimate) / its standard error, sorted.
        num_clusters: prompts.
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
        return Interval(float("nan"), float("nan"), float("nan"), float("nan"), np.zeros(0), 0)
    estimate = float(x.sum() / y.sum())
    if n < MIN_CLUSTERS:
        return Interval(estimate, float("nan"), float("nan"), float("nan"), np.zeros(0), n)
    error = float(_standard_error(np.ones((1, n)), x, y)[1][0])
    if error <= 1e-12 * max(1.0, abs(estimate)):
        return Interval(estimate, estimate, estimate, 0.0, np.zeros(1), n)
    studentised = np.sort(np.concatenate([(r - estimate) / e for r, e in _resampled(x, y, seed)]))
    tail = (1 - LEVEL) / 2
    lower, upper = np.quantile(studentised, [tail, 1 - tail])
    return Interval(estimate, estimate - upper * error, estimate - lower * error, error, studentised, n)


def _resampled(x: np.ndarray, y: np.ndarray, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ratios and standard errors of all resamples, in chunks of bounded memory."""
    rng = np.random.default_rng(seed)
    n = len(x)
    rows = max(1, min(_RESAMPLES, _CHUNK_ELEMENTS // n))
    results = []
    for start in range(0, _RESAMPLES, rows):
        size = min(rows, _RESAMPLES - start)
        drawn = rng.integers(0, n, size=(size, n))
        flat = np.bincount((drawn + n * np.arange(size)[:, None]).ravel(), minlength=size * n)
        ratio, error = _standard_error(flat.reshape(size, n).astype(np.float64), x, y)
        kept = error > 1e-12 * np.maximum(1.0, np.abs(ratio))  # a resample of one prompt alone tells no spread
        results.append((ratio[kept], error[kept]))
    return results


def _standard_error(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and its linearised standard error for each row of `weights` [B, n]."""
    n = len(x)
    total_y = weights @ y
    ratio = (weights @ x) / total_y
    squares = weights @ (x * x) - 2 * ratio * (weights @ (x * y)) + ratio**2 * (weights @ (y * y))
    variance = np.maximum(squares, 0.0) / (n - 1) * n / total_y**2
    return ratio, np.sqrt(variance)


def holm(p_values: list[float], alpha: float = 1 - LEVEL) -> list[bool]:
    """Which hypotheses of a family are rejected, the chance of any false rejection kept below `alpha` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected

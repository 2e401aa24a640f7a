"""Intervals cover the truth as often as they say, checked by simulation with fixed seeds."""

import numpy as np
import pytest

from bench.stats import MIN_CLUSTERS, Interval, holm, ratio_interval

SIMULATIONS = 400


def skewed_means(seed: int, n: int) -> Interval:
    rng = np.random.default_rng(seed)
    return ratio_interval(rng.normal(0.1, 0.15, n) + 0.1 * (rng.exponential(1, n) - 1), seed=seed)


def acceptance_ratios(seed: int, n: int) -> Interval:
    """Prompts differ in their steps and in how well the draft does; two draft tokens a step; true length 1.8."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(20, 200, n)
    accepted = rng.binomial(steps * 2, rng.beta(4, 6, n))
    return ratio_interval(accepted + steps, steps, seed=seed)


@pytest.mark.parametrize(("simulate", "truth"), [(skewed_means, 0.1), (acceptance_ratios, 1.8)])
@pytest.mark.parametrize("n", [12, 30])
def test_intervals_cover_the_truth_as_often_as_they_say(simulate, truth, n) -> None:  # type: ignore[no-untyped-def]
    covered = [i.low <= truth <= i.high for i in (simulate(seed, n) for seed in range(SIMULATIONS))]
    assert 0.93 <= np.mean(covered) <= 0.97


def test_a_test_rejects_exactly_where_the_interval_leaves_the_value_out() -> None:
    for seed in range(30):
        interval = skewed_means(seed, 20)
        width = interval.high - interval.low
        assert interval.p_value(interval.low - 0.02 * width) < 0.05
        assert interval.p_value(interval.low + 0.02 * width) > 0.05
        assert interval.p_value(interval.high + 0.02 * width) < 0.05
        assert interval.p_value(interval.high - 0.02 * width) > 0.05


def test_equal_input_and_seed_give_equal_output() -> None:
    first, again, other = skewed_means(3, 20), skewed_means(3, 20), skewed_means(4, 20)
    assert (first.low, first.high) == (again.low, again.high) != (other.low, other.high)


def test_resampling_agrees_with_a_slow_loop() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(20, 60, 10), rng.uniform(10, 30, 10)
    estimates = []
    for _ in range(4000):
        drawn = rng.integers(0, 10, 10)
        estimates.append(x[drawn].sum() / y[drawn].sum())
    interval = ratio_interval(x, y)
    assert interval.estimate == pytest.approx(x.sum() / y.sum())
    assert interval.error == pytest.approx(np.std(estimates) * np.sqrt(10 / 9), rel=0.1)


def test_too_few_prompts_give_no_interval_and_no_significance() -> None:
    interval = ratio_interval(np.linspace(1, 2, MIN_CLUSTERS - 1))
    assert interval.estimate == pytest.approx(1.5)
    assert np.isnan(interval.low)
    assert interval.p_value(0.0) == 1.0
    assert np.isnan(ratio_interval(np.zeros(0)).estimate)


def test_values_without_any_spread_give_a_point() -> None:
    interval = ratio_interval(np.full(8, 2.0))
    assert (interval.low, interval.high) == (2.0, 2.0)
    assert interval.p_value(2.0) == 1.0
    assert interval.p_value(1.0) == 0.0


def test_holm_stops_at_the_first_hypothesis_that_stands() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]
    assert holm([0.04]) == [True]
    assert holm([]) == []
    assert holm([0.02, 0.03]) == [True, True]
    assert holm([0.03, 0.03]) == [False, False]

"""Simulations: intervals cover as they say, no difference is rarely called one, also where requests run together."""

import numpy as np
import pytest

from bench.stats import Interval, crossed_interval, prompts_to_settle, ratio_interval

SIMULATIONS = 1000


def crossed(seed: int, num_repeats: int, repeat_noise: float, groups: int = 10, size: int = 4) -> Interval:
    """Log ratios with an effect of the prompt, of the group that shared a batch, and of the repeat; true mean 0.2."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(rng.normal(0, 0.05, groups), size) + rng.normal(0, 0.1, groups * size)
    together = np.repeat(rng.normal(0, 0.05, (num_repeats, groups)), size, axis=1)
    values = 0.2 + prompts + together + rng.normal(0, repeat_noise, (num_repeats, 1))
    values = values + rng.normal(0, 0.1, values.shape)
    group = np.tile(np.repeat(np.arange(groups), size), num_repeats)
    return crossed_interval(values.ravel(), group, np.repeat(np.arange(num_repeats), groups * size))


@pytest.mark.parametrize(("num_repeats", "repeat_noise"), [(1, 0.0), (3, 0.0), (3, 0.02), (5, 0.02)])
def test_intervals_under_load_cover_as_they_say(num_repeats: int, repeat_noise: float) -> None:
    found = [crossed(seed, num_repeats, repeat_noise) for seed in range(SIMULATIONS)]
    assert 0.93 <= np.mean([i.low <= 0.2 <= i.high for i in found]) <= 0.97


def test_ignoring_that_requests_ran_together_would_be_too_sure() -> None:
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(200):
        values = np.repeat(rng.normal(0, 0.1, 10), 4) + rng.normal(0, 0.02, 40)
        missed += not ratio_interval(values).low <= 0 <= ratio_interval(values).high
    assert missed / 200 > 0.15


@pytest.mark.parametrize("n", [12, 24])
def test_intervals_over_prompts_cover_a_known_difference_and_rarely_see_one_that_is_not_there(n: int) -> None:
    covered = rejected = 0
    for seed in range(2 * SIMULATIONS):
        noise = np.random.default_rng(seed).normal(0, 0.06, n)
        known = ratio_interval(noise + np.log(1.2))
        covered += known.low <= np.log(1.2) <= known.high
        rejected += ratio_interval(noise).p_value(0.0) < 0.05
    assert 0.93 <= covered / SIMULATIONS / 2 <= 0.97
    assert rejected / SIMULATIONS / 2 <= 0.05


def test_students_interval_for_many_prompts_agrees_with_the_bootstrap() -> None:
    values = np.random.default_rng(0).normal(0.1, 0.2, 500)
    few, many = ratio_interval(values), ratio_interval(np.concatenate([values, values[:1]]))
    assert (many.low, many.high) == pytest.approx((few.low, few.high), abs=0.002)


def test_the_number_of_prompts_that_settle_a_comparison_does_so_about_as_often_as_promised() -> None:
    pilot = ratio_interval(np.random.default_rng(3).normal(0.04, 0.1, 20))
    factor = prompts_to_settle(pilot, 0.001)
    assert factor is not None
    sd = pilot.error * np.sqrt(20)
    n = round(20 * factor)
    found = [
        ratio_interval(np.random.default_rng(seed).normal(pilot.estimate, sd, n)).p_value(0.0) < 0.05
        for seed in range(300)
    ]
    assert 0.7 <= np.mean(found) <= 0.9


def test_too_few_groups_give_no_interval() -> None:
    assert np.isnan(crossed(0, 3, 0.0, groups=3).low)
    assert prompts_to_settle(crossed(0, 3, 0.0, groups=3), 0.03) is None

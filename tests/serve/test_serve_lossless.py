"""The end-to-end tests' own measure: it tells a wrong sampler from a right one, and a near-tie from a wrong token."""

import numpy as np
import pytest
from lossless import NEAR_TIE, Greedy, two_sample_p, unexplained_difference

SHARES = np.array([0.4, 0.2, 0.1, *[0.01] * 30])


def samples(seed, shares, number=400):
    return np.random.default_rng(seed).choice(len(shares), size=number, p=shares).tolist()


def test_samples_of_one_distribution_pass_about_as_often_as_they_should():
    found = np.array([two_sample_p(samples(seed, SHARES), samples(1000 + seed, SHARES)) for seed in range(60)])
    assert found.min() > 0.001
    assert 0.3 < found.mean() < 0.7


@pytest.mark.parametrize("moved", [0.25, -0.25])
def test_a_sampler_that_favours_or_shuns_the_likeliest_token_is_found(moved):
    """What a wrong acceptance rule does: the drafted token comes too often, or never again once refused."""
    shares = SHARES * (1 - moved / 0.6 * (np.arange(len(SHARES)) > 0))
    shares[0] += moved
    assert all(two_sample_p(samples(s, SHARES), samples(99 + s, shares / shares.sum())) < 0.001 for s in range(10))


def test_equal_samples_have_p_one_and_disjoint_ones_the_least():
    assert two_sample_p(["a", "b"] * 50, ["b", "a"] * 50) == 1
    assert two_sample_p([("x", 1)] * 50, [("y", 1)] * 50) < 1e-4


def test_only_a_near_tie_explains_a_difference():
    reference = Greedy([1, 2, 3], [{1: -0.1, 9: -3.0}, {2: -0.7, 8: -0.7 - NEAR_TIE / 2}, {3: -0.2, 7: -2.0}])
    assert unexplained_difference([1, 2, 3], reference) is None
    assert unexplained_difference([1, 8, 5, 6], reference) is None
    assert "token 2 is 7, 1.80 behind 3" in unexplained_difference([1, 2, 7], reference)
    assert "token 1 is 4, inf behind 2" in unexplained_difference([1, 4], reference)
    assert "one answer ends at token 2" in unexplained_difference([1, 2], reference)

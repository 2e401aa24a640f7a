"""The one definition of acceptance, against counting step by step."""

import math
import random

import pytest
from pydantic import ValidationError

from speculators.acceptance import Acceptance


def random_steps(seed, K=4, count=200):
    rng = random.Random(seed)
    return [rng.randint(0, K) for _ in range(count)]


def of_steps(steps, K=4):
    return Acceptance.from_histogram([steps.count(a) for a in range(K + 1)])


@pytest.mark.parametrize("seed", range(3))
def test_every_number_equals_counting_the_steps_one_by_one(seed):
    steps, K = random_steps(seed), 4
    acceptance = of_steps(steps)
    assert acceptance.length == pytest.approx(sum(1 + a for a in steps) / len(steps))
    assert acceptance.rate == pytest.approx(sum(steps) / (K * len(steps)))
    for i in range(K):
        reached = [a for a in steps if a >= i]
        assert acceptance.marginal[i] == pytest.approx(sum(a > i for a in steps) / len(steps))
        assert acceptance.conditional[i] == pytest.approx(sum(a > i for a in reached) / len(reached))


def test_length_is_one_plus_the_sum_of_the_marginal_rates():
    acceptance = of_steps(random_steps(7))
    assert acceptance.length == pytest.approx(1 + sum(acceptance.marginal))


def test_the_servers_counters_give_the_same_histogram():
    steps, K = random_steps(1), 4
    per_position = [sum(a > i for a in steps) for i in range(K)]
    assert Acceptance.from_counters(len(steps), K * len(steps), per_position) == of_steps(steps)


def test_adding_and_subtracting_are_counting_more_and_fewer_steps():
    first, second = random_steps(1), random_steps(2)
    both = of_steps(first) + of_steps(second)
    assert both == of_steps(first + second)
    assert both - of_steps(first) == of_steps(second)
    assert Acceptance.empty(4) + of_steps(first) == of_steps(first)


def test_a_chain_cut_to_fewer_tokens_keeps_what_it_accepted_of_them():
    steps = random_steps(3)
    assert of_steps(steps).truncated(2) == of_steps([min(a, 2) for a in steps], K=2)


def test_no_steps_is_not_a_number_rather_than_a_lie():
    empty = Acceptance.empty(3)
    assert math.isnan(empty.length)
    assert math.isnan(empty.rate)
    assert all(math.isnan(rate) for rate in (*empty.marginal, *empty.conditional))


@pytest.mark.parametrize("fields", [{"histogram": (3, -1), "drafted": 2}, {"histogram": (0, 2), "drafted": 1}])
def test_impossible_counts_are_refused(fields):
    with pytest.raises(ValidationError):
        Acceptance(**fields)

"""Arrivals are a Poisson process that depends on its arguments alone; load points have names."""

import numpy as np
import pytest

from bench.load import Load, arrival_times_s


def test_arrivals_are_the_same_for_every_variant() -> None:
    assert arrival_times_s(2.0, 50, 3) == arrival_times_s(2.0, 50, 3)
    assert arrival_times_s(2.0, 50, 3) != arrival_times_s(2.0, 50, 4)
    assert arrival_times_s(2.0, 10, 3) == arrival_times_s(2.0, 50, 3)[:10]
    assert arrival_times_s(2.0, 0, 3) == []


def test_gaps_are_exponential() -> None:
    """Mean and standard deviation of exponential gaps are both 1 / rate, and neighbours are independent."""
    gaps = np.diff(arrival_times_s(4.0, 20_000, 0))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_a_load_has_a_name_and_comes_once() -> None:
    loads = Load.all_of((1, 4, 1), (0.5, 2.0))
    assert [load.name for load in loads] == ["c1", "c4", "r0.5", "r2"]
    assert [load.name for load in Load.all_of(None, ())] == ["c1"]
    assert [load.name for load in Load.all_of(None, (3.0,))] == ["r3"]

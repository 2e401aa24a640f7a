"""Servers are kept equally busy, whatever their speed and whatever fails."""

import numpy as np
import pytest
import torch

from speculators.data.endpoint_pool import LeastLoaded
from speculators.data.hidden_states import HiddenStates
from speculators.errors import UserError

STATES = HiddenStates(torch.zeros(1).int(), torch.zeros(1, 1, 1), torch.zeros(1, 1))


class Sources:
    """A pool whose sources note who was asked; `during[sample_id]` runs while that sample is in flight."""

    def __init__(self, number):
        self.asked, self.during = [], {}
        self.pool = LeastLoaded([lambda name, ids, i=i: self._fetch(i, name) for i in range(number)])

    def _fetch(self, i, name):
        self.asked.append((name, i))
        self.during.get(name, lambda: None)()
        return STATES

    def ask(self, name, length):
        return self.pool(name, np.zeros(length, np.int32))


def test_samples_that_are_done_at_once_go_to_each_source_in_turn():
    sources = Sources(3)
    for n in range(9):
        assert sources.ask(str(n), 5) is STATES
    assert [i for _, i in sources.asked] == [0, 1, 2] * 3


def test_a_source_that_is_busy_is_left_alone_until_the_others_have_as_many_tokens():
    sources = Sources(2)
    sources.during = {
        "long": lambda: [sources.ask("short", 40), sources.ask("other", 300), sources.ask("held", 60)],
        "held": lambda: [sources.ask("even", 30), sources.ask("held too", 50)],
        "held too": lambda: sources.ask("now less", 1),
    }
    sources.ask("long", 100)
    assert dict(sources.asked) == {
        "long": 0, "short": 1, "other": 1, "held": 1, "even": 1, "held too": 1, "now less": 0
    }  # fmt: skip


def test_a_failure_reaches_the_asker_and_leaves_no_tokens_in_flight():
    sources = Sources(2)

    def fail():
        raise UserError("out of luck")

    sources.during = {"bad": fail}
    with pytest.raises(UserError, match="out of luck"):
        sources.ask("bad", 1000)
    sources.during = {"a": lambda: sources.ask("b", 10)}
    for _ in range(200):
        sources.ask("a", 10)
    share = [sum(i == k for _, i in sources.asked) for k in range(2)]
    assert abs(share[0] - share[1]) <= 1 + 1000 // 10

"""How requests are sent: a fixed number in flight (closed loop), or arrivals at a rate whatever the server does (open).

A closed loop waits for a slow server and so asks less of it. In an open loop arrivals are a Poisson process, and a
latency counts from when the request was due (G. Tene, "coordinated omission").
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

_WARM_UPS_AT_A_RATE = 4


class Load(NamedTuple):
    """One of the two is given.

    Attributes:
        concurrency: requests in flight.
        rate: arrivals a second.
    """

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        """`c4` or `r2.5`: what rows and points call it."""
        return f"r{self.rate:g}" if self.rate is not None else f"c{self.concurrency}"

    @classmethod
    def all_of(cls, concurrencies: Sequence[int] | None, rates: Sequence[float]) -> tuple[Self, ...]:
        """The load points in the order given, each once; one request at a time if nothing was asked for."""
        closed = concurrencies if concurrencies is not None else ((1,) if not rates else ())
        wanted = [cls(concurrency=number) for number in closed] + [cls(rate=rate) for rate in rates]
        return tuple(dict.fromkeys(wanted))

    @property
    def warm_up_requests(self) -> int:
        """Requests at once before anything is measured: as many as are in flight; at a rate that is not known."""
        return self.concurrency or _WARM_UPS_AT_A_RATE


def arrival_times_s(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which `count` requests are due: exponential gaps of mean 1 / `rate`, the first one
    at once. Equal arguments give equal times, so every variant gets the same arrivals."""
    source = random.Random(f"arrivals:{seed}")
    gaps = (source.expovariate(rate) for _ in range(count - 1))
    return list(accumulate(gaps, initial=0.0))[:count]

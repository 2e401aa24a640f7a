"""Several sources of hidden states as one: each sample goes to the source with the fewest tokens in flight.

Tokens, not requests: samples differ in length, and a server is as busy as the tokens it was asked for.
"""

import threading
from collections.abc import Sequence

import numpy as np

from speculators.data.extract import Fetch
from speculators.data.hidden_states import HiddenStates


class LeastLoaded:
    """A `Fetch` over several that may be called from many threads; what one raises is passed on."""

    def __init__(self, sources: Sequence[Fetch]) -> None:
        self._sources = sources
        self._in_flight = [0] * len(sources)
        self._asked = [0] * len(sources)
        self._lock = threading.Lock()

    def __call__(self, sample_id: str, ids: np.ndarray) -> HiddenStates:
        """The states of `ids`, int32 [T]; between sources that are equally busy, from the one asked for less so far."""
        with self._lock:
            chosen = min(range(len(self._sources)), key=lambda i: (self._in_flight[i], self._asked[i]))
            self._in_flight[chosen] += len(ids)
            self._asked[chosen] += len(ids)
        try:
            return self._sources[chosen](sample_id, ids)
        finally:
            with self._lock:
                self._in_flight[chosen] -= len(ids)

"""The states of the next rows are asked for while earlier ones train: many samples at once, within the budget.

Everything happens in the order of the rows, so whatever waits for room waits for rows that are taken before it.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from speculators.data.endpoints import ClosedError
from speculators.data.on_demand import OnDemand
from speculators.data.samples import Split, TokenizedSample
from speculators.data.stored_states import HiddenStates

_ROWS_AHEAD = 64
_LOOK_UP_S = 0.1


class _Coming(NamedTuple):
    """A row that was begun: its samples, the requests for those that are missing, and the bytes held for them."""

    row: int
    samples: Sequence[TokenizedSample]
    requests: dict[int, "Future[HiddenStates | None]"]
    size_bytes: int


class Prefetch:
    """Serves one pass over rows: `in_order`, `states` and nothing else from one thread, `taken` from another."""

    def __init__(self, source: OnDemand, samples_of: Callable[[int], Sequence[TokenizedSample]], split: Split) -> None:
        assert source.pool is not None
        self._source, self._pool, self._samples_of, self._split = source, source.pool, samples_of, split
        self._begun: deque[_Coming] = deque()
        self._held: deque[int] = deque()
        self._closed = threading.Event()

    def in_order(self, rows: Iterable[int]) -> Iterator[int]:
        """The same rows, each begun before it is given and others begun ahead of it."""
        coming = iter(rows)
        following = next(coming, None)
        while following is not None or self._begun:
            while following is not None and len(self._begun) < _ROWS_AHEAD and self._begin(following):
                following = next(coming, None)
            if self._begun:
                yield self._begun[0].row
            if self._closed.is_set():
                return

    def states(self, row: int) -> list[HiddenStates | None]:
        """The states of the row given last; None for a sample that is left out.

        Raises:
            UserError: as `OnDemand.states`.
            ClosedError: the run is ending.
        """
        coming = self._begun[0]
        assert coming.row == row
        states = [
            self._result(coming.requests[i]) if i in coming.requests else self._source.states(sample, self._split)
            for i, sample in enumerate(coming.samples)
        ]
        self._held.append(coming.size_bytes)
        self._begun.popleft()
        return states

    def taken(self) -> None:
        """The trainer took a row: its bytes are its own now."""
        self._source.budget.give(self._held.popleft())

    def close(self) -> None:
        """Wake the reading thread; what was asked for and has not begun is dropped."""
        self._closed.set()
        for coming in list(self._begun):
            for request in coming.requests.values():
                request.cancel()

    def release(self) -> None:
        """Hand back what is held; the reading thread has ended."""
        self._source.budget.give(sum(self._held) + sum(coming.size_bytes for coming in self._begun))
        self._held.clear()
        self._begun.clear()

    def _begin(self, row: int) -> bool:
        """Ask for a row's missing samples; False when there is no room yet. Waits a moment if no row is begun."""
        samples = self._samples_of(row)
        missing = {sample.sample_id for sample in self._source.missing(samples)}
        size = (
            sum(len(sample.ids) for sample in samples if sample.sample_id in missing) * self._source.shape.token_bytes
        )
        holds_nothing = not self._held and not self._begun
        if not self._source.budget.take(size, holds_nothing, 0.0 if self._begun else _LOOK_UP_S):
            return False
        requests = {
            i: self._pool.submit(self._source.states, sample, self._split)
            for i, sample in enumerate(samples)
            if sample.sample_id in missing
        }
        self._begun.append(_Coming(row, samples, requests, size))
        return True

    def _result(self, request: "Future[HiddenStates | None]") -> HiddenStates | None:
        while not self._closed.is_set():
            try:
                return request.result(timeout=_LOOK_UP_S)
            except TimeoutError:
                continue
        raise ClosedError

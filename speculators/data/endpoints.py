"""Several extraction servers as one, for work that must outlive a server's restart.

Each request goes to the server with the fewest tokens in flight: samples differ in length, and a server is as busy as
the tokens it was asked for. One that is down is left aside for a while and then tried with a single request, while the
others wait. The trap: waiting for a server that is down is no failure of a sample until nothing
answered for the whole request timeout; everything else that goes wrong is one, and is tried again after a pause.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from speculators.data.extract_rest import FetchError, RestSource
from speculators.data.stored_states import HiddenStates

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LONGEST_ASIDE_S = 5.0
_SAY_EVERY_S = 15.0


class GivenUpError(Exception):
    """No usable states of a sample; the sentence names the endpoint, the sample and the last answer."""


class ClosedError(Exception):
    """The run is ending; nobody waits for these states any more."""


def say_on_stderr(line: str) -> None:
    """The default place of progress lines."""
    print(line, file=sys.stderr)


class _Server:
    """One server and what is known of it; guarded by the lock of `Endpoints`."""

    def __init__(self, source: RestSource) -> None:
        self.source = source
        self.tokens_in_flight = self.tokens_asked = 0
        self.answered_at = -math.inf
        self.down_since: float | None = None
        self.aside_until = self.aside_s = 0.0


class Endpoints:
    """A `Fetch` over one or more servers that may be called from many threads. Leaving the context closes them."""

    def __init__(
        self,
        sources: Sequence[RestSource],
        attempts: int,
        patience_s: float | None = None,
        answered_by: dict[str, str] | None = None,
        say: Callable[[str], None] = say_on_stderr,
        first_pause_s: float = _FIRST_PAUSE_S,
        say_every_s: float = _SAY_EVERY_S,
    ) -> None:
        """
        Args:
            sources: the servers.
            attempts: failed requests for one sample after which it is given up.
            patience_s: to wait while nothing answers; by default as long as for a request (`--request-timeout`).
            answered_by: gets the address of the server that each sample came from.
            say: gets a line now and then while nothing answers or requests fail.
            first_pause_s: after a failed request; doubled each time.
            say_every_s: seconds between those lines.
        """
        self._servers = [_Server(source) for source in sources]
        self._attempts, self._first_pause_s = attempts, first_pause_s
        self._patience_s = sources[0].timeout_s if patience_s is None else patience_s
        self._limit = f"{self._patience_s:g} s" + (" (--request-timeout)" if patience_s is None else "")
        self._answered_by = answered_by
        self._say, self._say_every_s, self._said = say, say_every_s, -math.inf
        self._changed = threading.Condition()
        self._closed = threading.Event()

    def __enter__(self) -> "Endpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Make every caller that waits for a server give up, and cut what is in flight after a moment."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        threads = [threading.Thread(target=server.source.close) for server in self._servers]
        for thread in threads:  # each waits for its own requests
            thread.start()
        for thread in threads:
            thread.join()

    def __call__(self, sample_id: str, ids: np.ndarray) -> HiddenStates:
        """The states of `ids`, int32 [T].

        Raises:
            GivenUpError: `attempts` requests failed, the sample was refused, or nothing answered for the timeout.
            ClosedError: the run is ending.
            UserError: a server is no extraction server, or writes outside the storage directory.
        """
        failures, server = 0, None
        while True:
            server = self._take(len(ids), avoid=server)
            started = time.monotonic()
            problem = None
            try:
                states = server.source.once(sample_id, ids)
                if self._answered_by is not None:
                    self._answered_by[sample_id] = server.source.base_url
                return states
            except FetchError as error:
                problem = error
            finally:
                unanswered = self._give_back(server, len(ids), problem, started)
            if self._closed.is_set():
                raise ClosedError
            if unanswered:
                if self._all_down_for_too_long():
                    raise _given_up(server, sample_id, ids, f"while nothing answered for {self._limit}", problem)
                continue
            failures = self._attempts if problem.kind == "refused" else failures + 1
            if failures >= self._attempts:
                raise _given_up(server, sample_id, ids, f"after {failures} failed requests in a row", problem)
            pause_s = min(_LONGEST_PAUSE_S, self._first_pause_s * 2 ** (failures - 1))
            self._say_now_and_then(f"{server.source.base_url}: {problem}; sample {sample_id} again in {pause_s:g} s")
            if self._closed.wait(pause_s):
                raise ClosedError

    def _take(self, tokens: int, avoid: _Server | None) -> _Server:
        """The least loaded server that is not left aside, `avoid` only if there is no other; waits for one."""
        with self._changed:
            while not self._closed.is_set():
                now = time.monotonic()
                ready = [server for server in self._servers if server.aside_until <= now]
                if ready:
                    chosen = min(ready, key=lambda s: (s is avoid, s.tokens_in_flight, s.tokens_asked))
                    chosen.tokens_in_flight += tokens
                    chosen.tokens_asked += tokens
                    if chosen.down_since is not None:
                        chosen.aside_until = math.inf  # one request finds out for all
                    return chosen
                self._say_waiting(now)
                soonest = min(server.aside_until for server in self._servers)
                self._changed.wait(min(1.0, max(0.001, soonest - now)))
        raise ClosedError

    def _give_back(self, server: _Server, tokens: int, problem: FetchError | None, started: float) -> bool:
        """Note how a request ended; whether it ended because nobody is there."""
        now = time.monotonic()
        with self._changed:
            server.tokens_in_flight -= tokens
            silent = problem is not None and problem.kind == "silent" and server.answered_at < started
            unanswered = silent or (problem is not None and problem.kind == "down")
            if unanswered:
                server.down_since = server.down_since or (started if silent else now)
                server.aside_s = min(_LONGEST_ASIDE_S, max(self._first_pause_s, 2 * server.aside_s))
                server.aside_until = now + server.aside_s
            else:
                if server.down_since is not None:
                    self._say(f"{server.source.base_url} answers again.")
                server.answered_at, server.down_since = now, None
                server.aside_s = server.aside_until = 0.0
            self._changed.notify_all()
            return unanswered

    def _all_down_for_too_long(self) -> bool:
        now = time.monotonic()
        with self._changed:
            return all(s.down_since is not None and now - s.down_since >= self._patience_s for s in self._servers)

    def _say_waiting(self, now: float) -> None:
        if all(s.down_since is not None for s in self._servers):
            since = max(s.down_since or now for s in self._servers)
            names = " and ".join(s.source.base_url for s in self._servers)
            self._say_now_and_then(
                f"waiting for {names}, where nothing answers ({now - since:.0f} s of at most {self._limit})"
            )

    def _say_now_and_then(self, line: str) -> None:
        now = time.monotonic()
        if now - self._said >= self._say_every_s:
            self._said = now
            self._say(line)


def _given_up(server: _Server, sample_id: str, ids: np.ndarray, when: str, problem: FetchError) -> GivenUpError:
    return GivenUpError(
        f"{server.source.base_url}: no hidden states for sample {sample_id} ({len(ids)} tokens) {when}; "
        f"the last answer: {problem}"
    )

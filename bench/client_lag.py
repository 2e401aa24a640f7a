"""How late this client handles what has arrived. A client that is too busy makes any server look slow.

A thread puts a time stamp into the event loop every few milliseconds, by the same way that data of a socket takes
(the loop's own socket becomes readable); the loop notes how old the stamp is when its turn comes.
"""

import asyncio
import threading
import time
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

INTERVAL_S = 0.01
# A steady lag cancels out of the time between tokens; one of this share of it says that the client hardly keeps up.
MAX_LAG_SHARE = 0.5
_MIN_LAG_S = 0.002  # below this it is the operating system's own scheduling


class ClientLag(NamedTuple):
    """Seconds between data lying ready and its handling, and how many samples that is known from."""

    mean_s: float
    p99_s: float
    num_samples: int

    def refusal(self, chunk_gap_s: float | None) -> str | None:
        """Why latencies measured under this lag must not be used; None if they may.

        Args:
            chunk_gap_s: median time between chunks of one stream, which the lag blurs.
        """
        if chunk_gap_s is None or self.mean_s <= max(_MIN_LAG_S, MAX_LAG_SHARE * chunk_gap_s):
            return None
        return (
            f"the client was the bottleneck: what had arrived waited {1000 * self.mean_s:.1f} ms on average for being "
            f"handled, and chunks came every {1000 * chunk_gap_s:.1f} ms; lower the load, or run the client elsewhere"
        )


class LagMeter:
    """Context manager inside a running event loop; `lag()` tells about the time since it was entered."""

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._stamp, daemon=True)
        self._thread.start()
        return self

    def _stamp(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self._loop.call_soon_threadsafe(self._note, time.perf_counter())
            except RuntimeError:  # the loop was closed meanwhile
                return

    def _note(self, stamped: float) -> None:
        self._samples.append(time.perf_counter() - stamped)

    def lag(self) -> ClientLag | None:
        """None if it was too short for a single sample."""
        if not self._samples:
            return None
        return ClientLag(float(np.mean(self._samples)), float(np.quantile(self._samples, 0.99)), len(self._samples))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

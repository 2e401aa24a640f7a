"""Ctrl-C and SIGTERM: the first one asks the run to save and end, the second one ends it where it stands."""

import signal
import sys
import threading
from types import FrameType


class StopRequest:
    """A context manager; `asked` turns true at the first signal, the second raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nStopping after this step, with a checkpoint; once more to stop at once.", file=sys.stderr)

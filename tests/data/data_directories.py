"""Data directories made of ready samples, for tests that need no conversations."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from speculators.data.samples import (
    FORMAT_VERSION,
    DataDirectory,
    DataManifest,
    Split,
    SplitStats,
    TokenizedSample,
    sample_id,
)
from speculators.verifier import Verifier


def write_samples(
    path: Path,
    verifier: Verifier,
    splits: dict[Split, list[TokenizedSample]],
    max_length: int,
    token_counts: np.ndarray | None = None,
) -> None:
    """A data directory that holds these samples; token counts of zero unless given."""
    stats = {name: SplitStats.of(samples) for name, samples in splits.items()}
    manifest = DataManifest(
        format_version=FORMAT_VERSION,
        verifier=verifier.path,
        verifier_revision=verifier.revision,
        template_hash=verifier.template_hash,
        max_length=max_length,
        validation_share=0.2,
        vocab_size=verifier.vocab_size,
        splits=stats,
    )
    counts = np.zeros(verifier.vocab_size, np.int64) if token_counts is None else token_counts
    DataDirectory.write(path, manifest, counts, splits)


def random_samples(vocab_size: int, lengths: Sequence[int]) -> list[TokenizedSample]:
    """One sample of random tokens for each length, every token supervised."""
    generator = np.random.default_rng(0)
    drawn = [generator.integers(0, vocab_size, length).astype(np.int32) for length in lengths]
    return [TokenizedSample(sample_id(ids), f"c{i}", "", ids, np.ones(len(ids), bool)) for i, ids in enumerate(drawn)]

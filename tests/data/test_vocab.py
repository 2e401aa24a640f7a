"""The draft vocabulary's maps, against slow loops over the definition."""

import numpy as np
import pytest

from speculators.data.vocab import VocabMap
from speculators.errors import UserError

COUNTS = np.random.default_rng(0).integers(0, 9, size=60)


@pytest.mark.parametrize("size", [2, 7, 31, 60])
def test_maps_agree_with_the_definition(size):
    vocab = VocabMap.from_counts(COUNTS, size, always=(3, 50))
    draft_ids = [token for token in range(60) if vocab.t2d[token]]
    assert len(draft_ids) == size == vocab.draft_vocab_size
    assert [i + int(vocab.d2t[i]) for i in range(size)] == draft_ids
    expected = [draft_ids.index(token) if token in draft_ids else -1 for token in range(60)]
    assert vocab.to_draft(np.arange(60)).tolist() == expected
    assert vocab.to_verifier(np.arange(size)).tolist() == draft_ids
    assert (vocab.t2d.dtype, vocab.d2t.dtype) == (np.bool_, np.int64)


@pytest.mark.parametrize("size", [2, 7, 31])
def test_keeps_the_most_frequent_tokens_and_equal_counts_go_by_the_smaller_id(size):
    vocab = VocabMap.from_counts(COUNTS, size, always=(3, 50))
    ranked = sorted((token for token in range(60) if token not in (3, 50)), key=lambda token: (-COUNTS[token], token))
    assert set(np.flatnonzero(vocab.t2d)) == {3, 50, *ranked[: size - 2]}


def test_coverage_is_the_kept_share_of_the_counted_tokens():
    vocab = VocabMap.from_counts(COUNTS, 12)
    kept = sum(int(COUNTS[token]) for token in range(60) if vocab.t2d[token])
    assert vocab.coverage == kept / int(COUNTS.sum())


def test_the_whole_vocabulary_is_the_identity():
    vocab = VocabMap.from_counts(COUNTS, 60, always=(1,))
    assert vocab.t2d.all()
    assert not vocab.d2t.any()
    assert vocab.coverage == 1


def test_coverage_of_nothing_is_nan():
    assert np.isnan(VocabMap.from_counts(np.zeros(5, np.int64), 2).coverage)


@pytest.mark.parametrize("size", [0, 1, 61])
def test_impossible_sizes_are_refused_with_the_allowed_ones(size):
    with pytest.raises(UserError, match=rf"--draft-vocab-size: {size} .* from 2 to 60"):
        VocabMap.from_counts(COUNTS, size, always=(3, 50))


def test_counts_are_left_as_they_were():
    counts = COUNTS.copy()
    VocabMap.from_counts(counts, 5, always=(0,))
    np.testing.assert_array_equal(counts, COUNTS)

"""The draft vocabulary: which verifier tokens a draft can propose, as the two maps that vLLM reads. No torch here."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speculators.errors import UserError


class VocabMap(NamedTuple):
    """A reduced vocabulary of D tokens out of the verifier's V.

    Attributes:
        t2d: bool [V]; True where the verifier's token is in the draft vocabulary; exactly D are.
        d2t: int64 [D]; an offset, not an id: verifier id = i + d2t[i]. Ids ascend with i.
        coverage: share of the counted (supervised) tokens that the draft can propose; nan when nothing was counted.
    """

    t2d: np.ndarray
    d2t: np.ndarray
    coverage: float

    @classmethod
    def from_counts(cls, counts: np.ndarray, draft_vocab_size: int, always: Sequence[int] = ()) -> "VocabMap":
        """Keep the most frequent tokens; equal counts go by the smaller id, so the same counts give the same map.

        Args:
            counts: int64 [V], how often each verifier token is a supervised target.
            draft_vocab_size: D; V gives the identity.
            always: ids kept whatever their count (the end-of-turn tokens).

        Raises:
            UserError: D is not in 1..V, or too small for `always`.
        """
        vocab_size = len(counts)
        kept = sorted({int(token) for token in always if 0 <= token < vocab_size})
        if not max(1, len(kept)) <= draft_vocab_size <= vocab_size:
            raise UserError(
                f"--draft-vocab-size: {draft_vocab_size} is not possible; the verifier has {vocab_size} tokens, "
                f"{len(kept)} of them always kept; choose a size from {max(1, len(kept))} to {vocab_size}."
            )
        priority = counts.astype(np.int64)
        priority[kept] = np.iinfo(np.int64).max
        chosen = np.argsort(-priority, kind="stable")[:draft_vocab_size]
        t2d = np.zeros(vocab_size, dtype=np.bool_)
        t2d[chosen] = True
        d2t = np.flatnonzero(t2d) - np.arange(draft_vocab_size)
        total = int(counts.sum())
        return cls(t2d, d2t.astype(np.int64), int(counts[t2d].sum()) / total if total else float("nan"))

    @property
    def draft_vocab_size(self) -> int:
        """D."""
        return len(self.d2t)

    def to_draft(self, ids: np.ndarray) -> np.ndarray:
        """Draft ids (int64) of verifier ids of any shape; -1 where the draft has no such token."""
        return np.where(self.t2d, np.cumsum(self.t2d) - 1, -1)[ids]

    def to_verifier(self, draft_ids: np.ndarray) -> np.ndarray:
        """Verifier ids (int64) of draft ids of any shape."""
        return draft_ids + self.d2t[draft_ids]

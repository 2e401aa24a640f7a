"""THE definition of acceptance: validation, replay, vLLM's counters, single requests and reports all use this one type.

A verification step drafts K tokens and accepts the first `a` of them (0 <= a <= K), then emits one more token from the
verifier (the bonus token). Everything below follows from counting steps by `a`.
"""

from collections.abc import Sequence
from itertools import count
from operator import mul

from pydantic import Field, model_validator

from speculators.schema import Strict


class Acceptance(Strict):
    """Counts of verification steps by the number of accepted draft tokens.

    Attributes:
        histogram: `histogram[a]` = steps that accepted exactly `a` draft tokens; its length is K + 1.
        drafted: draft tokens proposed over all steps (K x steps, unless steps were cut short).
    """

    histogram: tuple[int, ...] = Field(min_length=1)
    drafted: int = Field(ge=0)

    @model_validator(mode="after")
    def _check(self) -> "Acceptance":
        if min(self.histogram) < 0:
            raise ValueError("a count of steps is negative")
        if self.accepted > self.drafted:
            raise ValueError(f"{self.accepted} accepted tokens out of {self.drafted} drafted")
        return self

    @classmethod
    def empty(cls, num_speculative_tokens: int) -> "Acceptance":
        """No steps yet, for drafts of `num_speculative_tokens`."""
        return cls(histogram=(0,) * (num_speculative_tokens + 1), drafted=0)

    @classmethod
    def from_histogram(cls, histogram: Sequence[int]) -> "Acceptance":
        """From counts by accepted tokens, every step having drafted the full K = len(histogram) - 1."""
        counts = tuple(int(count) for count in histogram)
        return cls(histogram=counts, drafted=sum(counts) * (len(counts) - 1))

    @classmethod
    def from_counters(
        cls, num_drafts: int, num_draft_tokens: int, accepted_per_position: Sequence[int]
    ) -> "Acceptance":
        """From vLLM's counters (`vllm:spec_decode_num_drafts_total`, `..._num_draft_tokens_total`,
        `..._num_accepted_tokens_per_pos_total`). Position i counts the steps that accepted more than i tokens, so
        neighbours' differences are the histogram.
        """
        at_least = [num_drafts, *accepted_per_position]
        counts = [upper - lower for upper, lower in zip(at_least, [*at_least[1:], 0], strict=True)]
        return cls(histogram=tuple(counts), drafted=num_draft_tokens)

    @property
    def num_speculative_tokens(self) -> int:
        """K: draft tokens a full step proposes."""
        return len(self.histogram) - 1

    @property
    def steps(self) -> int:
        """Verification steps."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted over all steps; the bonus token is not one of them."""
        return sum(map(mul, self.histogram, count()))

    @property
    def length(self) -> float:
        """Acceptance length: tokens emitted per step, bonus included = 1 + accepted / steps; nan without steps."""
        steps = self.steps
        return 1 + self.accepted / steps if steps else float("nan")

    @property
    def rate(self) -> float:
        """Accepted share of the drafted tokens; nan when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def marginal(self) -> tuple[float, ...]:
        """For each position i < K: share of all steps that accepted position i. Their sum is `length` - 1."""
        return tuple(
            self._at_least(i + 1) / self.steps if self.steps else float("nan")
            for i in range(self.num_speculative_tokens)
        )

    @property
    def conditional(self) -> tuple[float, ...]:
        """For each position i < K: share accepted among the steps that accepted every position before i."""
        rates = []
        for i in range(self.num_speculative_tokens):
            reached = self._at_least(i)
            rates.append(self._at_least(i + 1) / reached if reached else float("nan"))
        return tuple(rates)

    def truncated(self, num_speculative_tokens: int) -> "Acceptance":
        """What the same steps would have accepted with a smaller K. Exact for a chain (eagle3); for a block draft
        (dflash) it is not, since a smaller K shows it fewer mask tokens."""
        kept = self.histogram[:num_speculative_tokens]
        tail = sum(self.histogram[num_speculative_tokens:])
        return Acceptance.from_histogram((*kept, tail))

    def _at_least(self, a: int) -> int:
        return sum(self.histogram[a:])

    def __add__(self, other: "Acceptance") -> "Acceptance":
        size = max(len(self.histogram), len(other.histogram))
        padded = [counts + (0,) * (size - len(counts)) for counts in (self.histogram, other.histogram)]
        summed = tuple(a + b for a, b in zip(*padded, strict=True))
        return Acceptance(histogram=summed, drafted=self.drafted + other.drafted)

    def __sub__(self, other: "Acceptance") -> "Acceptance":
        """What happened between two readings of cumulative counters (`self` the later one)."""
        size = max(len(self.histogram), len(other.histogram))
        padded = [counts + (0,) * (size - len(counts)) for counts in (self.histogram, other.histogram)]
        left = tuple(a - b for a, b in zip(*padded, strict=True))
        return Acceptance(histogram=left, drafted=self.drafted - other.drafted)

"""What a replay predicts, as it is written to disk: by sample, by source and in total. No torch here."""

from collections.abc import Iterable

from speculators.acceptance import Acceptance
from speculators.schema import Strict


class SamplePrediction(Strict):
    """The walk over one sample."""

    sample_id: str
    conversation_id: str
    source: str
    acceptance: Acceptance


class Prediction(Strict):
    """Predicted acceptance of a draft, in total and by source."""

    draft: str
    total: Acceptance
    by_source: dict[str, Acceptance]
    samples: tuple[SamplePrediction, ...]

    @classmethod
    def of(cls, draft: str, samples: Iterable[SamplePrediction], num_speculative_tokens: int) -> "Prediction":
        """Add up single walks."""
        samples = tuple(samples)
        by_source: dict[str, Acceptance] = {}
        for sample in samples:
            before = by_source.get(sample.source, Acceptance.empty(num_speculative_tokens))
            by_source[sample.source] = before + sample.acceptance
        total = sum(by_source.values(), start=Acceptance.empty(num_speculative_tokens))
        return cls(draft=draft, total=total, by_source=dict(sorted(by_source.items())), samples=samples)

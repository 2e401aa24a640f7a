"""Is speculation lossless here? Greedy outputs of a variant against those of the plain server, token by token."""

from collections.abc import Sequence
from typing import Literal

from bench.compare import without_variant
from bench.records import RequestRecord
from speculators.schema import Strict


class Losslessness(Strict):
    """How often a variant's greedy output equals the reference's, and where it first leaves it.

    Attributes:
        unit: what was compared and what positions count: tokens, or characters where a server tells no token ids.
        first_differences: position of the first difference of every output that differs, ascending.
    """

    variant: str
    reference: str
    unit: Literal["tokens", "characters"]
    compared: int
    equal: int
    first_differences: tuple[int, ...]


def losslessness(
    variant_records: Sequence[RequestRecord], reference_records: Sequence[RequestRecord]
) -> Losslessness | None:
    """Compare first-turn outputs request by request (later turns see other histories); None without a common one."""
    reference = {without_variant(r.key): r for r in reference_records if r.ok}
    pairs = [
        (record, reference[without_variant(record.key)])
        for record in variant_records
        if record.ok and record.turn == 0 and without_variant(record.key) in reference
    ]
    if not pairs:
        return None
    by_tokens = all(record.token_ids is not None for pair in pairs for record in pair)
    differences = []
    for mine, other in pairs:
        at = (
            first_difference(mine.token_ids or (), other.token_ids or ())
            if by_tokens
            else first_difference(mine.text, other.text)
        )
        if at is not None:
            differences.append(at)
    return Losslessness(
        variant=pairs[0][0].variant,
        reference=pairs[0][1].variant,
        unit="tokens" if by_tokens else "characters",
        compared=len(pairs),
        equal=len(pairs) - len(differences),
        first_differences=tuple(sorted(differences)),
    )


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The first position at which two sequences differ; one that ends early differs at its end; None when equal."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))

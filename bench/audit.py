"""Is speculation lossless here? Greedy outputs of a variant against those of the plain server, token by token.

A server does not always repeat itself: in bfloat16 a batch of another shape rounds differently, and nearly tied tokens
part. How often the plain server leaves its own output is the noise floor that a variant is held against; how nearly
tied the two tokens were (`bench/margins.py`) tells rounding from a wrong token. The trap: FP8 weights are others, so a
draft on them is held against the plain FP8 server, and that one against nothing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from bench.conditions import DEFAULT_POINT, Variant
from bench.pairing import same_request
from bench.records import RequestKey, RequestRecord
from speculators.schema import Strict

AuditVerdict = Literal["identical", "within noise", "near ties", "differs", "other weights", "unknown"]
# Unequal bfloat16 logits between 16 and 32 are 0.125 apart at least. Where lossless drafts left the output of a model
# with 135M parameters the margins were at most 0.25; those of other weights (FP8) went up to 2.
NEAR_TIE_NATS = 0.5
_LEVEL = 0.05


class Losslessness(Strict):
    """How often a variant's greedy output equals the reference's, and where it first leaves it.

    Attributes:
        unit: what was compared and what positions count: tokens, or characters where a server tells no token ids.
        first_differences: position of the first difference of every output that differs, ascending.
        margins: log-probability (nats) of the reference's token less that of the variant's at these places, as the
            plain server gives them, ascending; of the differences at which it was asked.
        floor_compared, floor_equal, floor_margins: the same for the reference's second go at the same prompts; 0 and
            empty without one.
        verdict: `identical`; `within noise`, as often different as the reference is from itself; `near ties`, more
            often (or without a floor), but never where the tokens were more than `NEAR_TIE_NATS` or the floor's largest
            margin apart; `differs`, where they were further apart, or more often than chance (Fisher's exact test,
            one-sided, 5 %) without all margins; `other weights`, which is no question of speculation; `unknown`.
    """

    variant: str
    reference: str
    point: str = DEFAULT_POINT
    unit: Literal["tokens", "characters"]
    compared: int
    equal: int
    first_differences: tuple[int, ...]
    margins: tuple[float, ...] = ()
    floor_compared: int = 0
    floor_equal: int = 0
    floor_margins: tuple[float, ...] = ()
    verdict: AuditVerdict = "unknown"


class Margin(NamedTuple):
    """Position of a first difference, and how much likelier (nats) the reference's token was there."""

    position: int
    nats: float


Margins = Mapping[RequestKey, Margin]


class Difference(NamedTuple):
    """Two outputs to one request, and the first position at which they differ."""

    mine: RequestRecord
    other: RequestRecord
    position: int


class _Match(NamedTuple):
    by_tokens: bool
    compared: int
    differences: list[Difference]

    def margins(self, known: Margins) -> tuple[float, ...]:
        found = [(d, known[d.mine.key]) for d in self.differences if self.by_tokens and d.mine.key in known]
        return tuple(sorted(margin.nats for d, margin in found if margin.position == d.position))


def losslessness(
    variant_records: Sequence[RequestRecord],
    reference_records: Sequence[RequestRecord],
    repeated_records: Sequence[RequestRecord] = (),
    margins: Margins | None = None,
    same_weights: bool = True,
) -> Losslessness | None:
    """Compare first-turn outputs request by request (later turns see other histories); None without a common one.

    Args:
        reference_records: of the plain server, at the same load.
        repeated_records: its closing pass; without one, its second repeat is the noise floor.
        margins: of the differing request (the variant's, or the reference's own second go).
        same_weights: whether the reference has the variant's weights.
    """
    match = _match(variant_records, reference_records)
    if match is None:
        return None
    floor = _match(repeated_records, reference_records) or _match(*_own_repeats(reference_records))
    known = margins or {}
    own_margins, floor_margins = match.margins(known), floor.margins(known) if floor else ()
    counts = len(match.differences), match.compared
    floor_counts = (len(floor.differences), floor.compared) if floor else (0, 0)
    return Losslessness(
        variant=variant_records[0].variant,
        reference=reference_records[0].variant,
        point=reference_records[0].point,
        unit="tokens" if match.by_tokens else "characters",
        compared=counts[1],
        equal=counts[1] - counts[0],
        first_differences=tuple(sorted(d.position for d in match.differences)),
        margins=own_margins,
        floor_compared=floor_counts[1],
        floor_equal=floor_counts[1] - floor_counts[0],
        floor_margins=floor_margins,
        verdict=_verdict(counts, floor_counts, own_margins, floor_margins) if same_weights else "other weights",
    )


def first_differences(mine: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> list[Difference]:
    """Where outputs in `mine` first leave those of `others`; empty where a server tells no token ids."""
    match = _match(mine, others)
    return match.differences if match and match.by_tokens else []


def own_differences(
    reference_records: Sequence[RequestRecord], repeated_records: Sequence[RequestRecord]
) -> list[Difference]:
    """The same for the plain server's second go, which is its noise floor; `mine` has the key of the row on disk."""
    if repeated_records:
        return first_differences(repeated_records, reference_records)
    return first_differences(*_own_repeats(reference_records))


def audited_against(variant: Variant, variants: Sequence[Variant], baseline: str) -> str | None:
    """The plain server that a variant's outputs are held against: for drafts on FP8 the plain FP8 one.

    Args:
        variants: those of the variant's run.

    Returns:
        None for a draft on FP8 without a plain FP8 server: no output there has the same weights.
    """
    if not (variant.fp8 and variant.speculates):
        return baseline
    return next((v.name for v in variants if v.fp8 and not v.speculates), None)


def closed_with(variants: Sequence[Variant], baseline: str) -> list[str]:
    """Plain servers that are measured again at the end: the baseline, and the FP8 one that drafts are held against."""
    against = {audited_against(variant, variants, baseline) for variant in variants if variant.speculates}
    return [baseline, *(v.name for v in variants if v.name != baseline and v.name in against)]


def audit_sentence(audit: Losslessness) -> str:
    """The verdict, with how many greedy outputs are the reference's and how far apart the tokens were elsewhere."""
    unit, at = audit.unit[:-1], audit.first_differences
    share = f"{audit.variant}: {audit.equal} of {audit.compared} outputs equal {audit.reference}'s {unit} for {unit}"
    if audit.verdict == "identical":
        return f"{share}: lossless here."
    own = f"{audit.reference} equals its own repeat in {audit.floor_equal} of {audit.floor_compared}"
    endings = {
        "within noise": f"{own}, so this is the server's own noise",
        "near ties": "only where two tokens were nearly tied, so this is rounding and no loss",
        "differs": "the variant changes outputs beyond the server's own noise",
        "other weights": "it has other weights, so this is what quantisation changes, not speculation",
        "unknown": "without a repeat of the plain server nobody can tell whether that is its own noise",
    }
    parts = [share]
    if at:
        parts.append(f"the others first differ at {unit} {at[len(at) // 2] + 1} (median; earliest {at[0] + 1})")
    if audit.margins:
        parts.append(_margin_text(audit))
    if audit.verdict in ("near ties", "differs") and audit.floor_compared:
        parts.append(own)
    return "; ".join([*parts, endings[audit.verdict]]) + "."


def _margin_text(audit: Losslessness) -> str:
    margins, floor = audit.margins, audit.floor_margins
    own = f" ({audit.reference}'s own: at most {floor[-1]:+.2f})" if floor else ""
    known = "" if len(margins) == len(audit.first_differences) else f", known at {len(margins)} of them"
    return (
        f"there the log-probability margin of {audit.reference}'s token is {margins[len(margins) // 2]:+.2f} nats in "
        f"the median and {margins[-1]:+.2f} at most{own}{known}"
    )


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The first position at which two sequences differ; one that ends early differs at its end; None when equal."""
    if a == b:
        return None
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _own_repeats(records: Sequence[RequestRecord]) -> tuple[list[RequestRecord], list[RequestRecord]]:
    return [r for r in records if r.repeat == 1], [r.model_copy(update={"repeat": 1}) for r in records if r.repeat == 0]


def _match(mine: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> _Match | None:
    reference = {same_request(r): r for r in others if r.ok}
    pairs = [
        (record, reference[key])
        for record in mine
        if record.ok and record.turn == 0 and (key := same_request(record)) in reference
    ]
    if not pairs:
        return None
    by_tokens = all(record.token_ids is not None for pair in pairs for record in pair)
    found = []
    for own, other in pairs:
        sides = (own.token_ids or (), other.token_ids or ()) if by_tokens else (own.text, other.text)
        if (position := first_difference(*sides)) is not None:
            found.append(Difference(own, other, position))
    return _Match(by_tokens, len(pairs), found)


def _verdict(
    counts: tuple[int, int], floor: tuple[int, int], margins: Sequence[float], floor_margins: Sequence[float]
) -> AuditVerdict:
    """Args: how many outputs differ and how many were compared, of the variant and of the reference itself."""
    different = counts[0]
    if not different:
        return "identical"
    tie = max([NEAR_TIE_NATS, *floor_margins])
    if any(margin > tie for margin in margins):
        return "differs"
    if floor[1] and _more_often(*counts, *floor) >= _LEVEL:
        return "within noise"
    if len(margins) == different:
        return "near ties"
    return "differs" if floor[1] else "unknown"


def _more_often(a: int, n: int, b: int, m: int) -> float:
    """Fisher's exact test, one-sided: chance that `a` or more of a + b events are among n of n + m trials."""
    events = a + b
    ways = sum(math.comb(n, k) * math.comb(m, events - k) for k in range(a, min(n, events) + 1))
    return ways / math.comb(n + m, events)

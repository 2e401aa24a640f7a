"""Is speculation lossless here? Greedy outputs of a variant against those of the plain server, token by token.

A server does not always repeat itself: in bfloat16 a batch of another shape rounds differently, and nearly tied tokens
part. How often the plain server leaves its own output is the noise floor that a variant is held against.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bench.conditions import DEFAULT_POINT
from bench.pairing import same_request
from bench.records import RequestRecord
from speculators.schema import Strict

AuditVerdict = Literal["identical", "within noise", "differs", "unknown"]
_LEVEL = 0.05


class Losslessness(Strict):
    """How often a variant's greedy output equals the reference's, and where it first leaves it.

    Attributes:
        unit: what was compared and what positions count: tokens, or characters where a server tells no token ids.
        first_differences: position of the first difference of every output that differs, ascending.
        floor_compared, floor_equal: the same for the reference's second go at the same prompts; 0 without one.
        verdict: `identical`; `within noise`, as often different as the reference is from itself; `differs`, more often
            than chance (Fisher's exact test, one-sided, 5 %); `unknown`, different without a noise floor.
    """

    variant: str
    reference: str
    point: str = DEFAULT_POINT
    unit: Literal["tokens", "characters"]
    compared: int
    equal: int
    first_differences: tuple[int, ...]
    floor_compared: int = 0
    floor_equal: int = 0
    verdict: AuditVerdict = "unknown"


class _Match(NamedTuple):
    by_tokens: bool
    compared: int
    differences: list[int]


def losslessness(
    variant_records: Sequence[RequestRecord],
    reference_records: Sequence[RequestRecord],
    repeated_records: Sequence[RequestRecord] = (),
) -> Losslessness | None:
    """Compare first-turn outputs request by request (later turns see other histories); None without a common one.

    Args:
        reference_records: of the plain server with the same weights, at the same load.
        repeated_records: its closing pass; without one, its second repeat is the noise floor.
    """
    match = _match(variant_records, reference_records)
    if match is None:
        return None
    floor = _match(repeated_records, reference_records) or _match(
        [r.model_copy(update={"repeat": 0}) for r in reference_records if r.repeat == 1],
        [r for r in reference_records if r.repeat == 0],
    )
    compared, different = match.compared, len(match.differences)
    floor_compared, floor_different = (floor.compared, len(floor.differences)) if floor else (0, 0)
    return Losslessness(
        variant=variant_records[0].variant,
        reference=reference_records[0].variant,
        point=reference_records[0].point,
        unit="tokens" if match.by_tokens else "characters",
        compared=compared,
        equal=compared - different,
        first_differences=tuple(sorted(match.differences)),
        floor_compared=floor_compared,
        floor_equal=floor_compared - floor_different,
        verdict=_verdict(different, compared, floor_different, floor_compared),
    )


def audit_sentence(audit: Losslessness) -> str:
    """The verdict, with how many greedy outputs are the reference's."""
    unit, at = audit.unit[:-1], audit.first_differences
    share = f"{audit.variant}: {audit.equal} of {audit.compared} outputs equal {audit.reference}'s {unit} for {unit}"
    if audit.verdict == "identical":
        return f"{share}: lossless here."
    where = f"the others first differ at {unit} {at[len(at) // 2] + 1} (median; earliest {at[0] + 1})"
    own = f"{audit.reference} equals its own repeat in {audit.floor_equal} of {audit.floor_compared}"
    ends = {
        "within noise": f"{own}, so this is the server's own noise",
        "differs": f"{own}, so the variant changes outputs beyond the server's own noise",
        "unknown": "without a repeat of the plain server nobody can tell whether that is its own noise",
    }
    return f"{share}; {where}; {ends[audit.verdict]}."


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """The first position at which two sequences differ; one that ends early differs at its end; None when equal."""
    if a == b:
        return None
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


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
    found = [
        first_difference(mine.token_ids or (), other.token_ids or ())
        if by_tokens
        else first_difference(mine.text, other.text)
        for mine, other in pairs
    ]
    return _Match(by_tokens, len(pairs), [at for at in found if at is not None])


def _verdict(different: int, compared: int, floor_different: int, floor_compared: int) -> AuditVerdict:
    if not different:
        return "identical"
    if not floor_compared:
        return "unknown"
    return "differs" if _more_often(different, compared, floor_different, floor_compared) < _LEVEL else "within noise"


def _more_often(a: int, n: int, b: int, m: int) -> float:
    """Fisher's exact test, one-sided: chance that `a` or more of a + b events are among n of n + m trials."""
    events = a + b
    ways = sum(math.comb(n, k) * math.comb(m, events - k) for k in range(a, min(n, events) + 1))
    return ways / math.comb(n + m, events)

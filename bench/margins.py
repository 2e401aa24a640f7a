"""How nearly tied were the two tokens where an output first leaves the plain server's? Asked of that server afterwards.

Log-probabilities with every measured request would slow the servers, each variant by another share. One more question
a difference disturbs nothing: the shared prefix as token ids, one token more, and the log-probabilities of the two. The
trap: that is a prefill, while the tokens came out of decoding steps, so margins near 0 may have either sign.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import requests

from bench.audit import Difference, Margin, audited_against, first_differences, own_differences
from bench.conditions import CLOSING_PASS, DEFAULT_POINT, Variant
from bench.records import BASELINE, RequestKey, RequestRecord
from serve.endpoint import Endpoint
from speculators.schema import Strict, read_json, write_json

MARGINS_FILE = "margins.json"
_TOP = 20  # vLLM's default limit; servers that cannot be asked for two tokens give the likeliest ones
_MOST_A_POINT = 50  # of one variant at one load
_TIMEOUT_S = 60.0


class MarginRow(Strict):
    """Log-probabilities (nats) of two tokens at the first difference of one request's output.

    Attributes:
        pass_index: 1 for the plain server's own closing pass, as in the rows.
        logprob, other_logprob: of the plain server's token and of the other one, which is an upper bound when it was
            not among the likeliest.
    """

    variant: str
    task: str
    prompt_id: str
    repeat: int = 0
    point: str = DEFAULT_POINT
    pass_index: int = 0
    position: int
    logprob: float
    other_logprob: float

    @property
    def margin(self) -> Margin:
        """How much likelier the plain server's token was."""
        return Margin(self.position, self.logprob - self.other_logprob)


class MarginFile(Strict):
    """`margins.json`."""

    margins: tuple[MarginRow, ...] = ()


def read_margins(directory: Path, names: Mapping[str, str] | None = None) -> dict[RequestKey, Margin]:
    """What the plain servers of a run said; empty if they were not asked.

    Args:
        names: how the run's variants are called elsewhere; None leaves them as they are.

    Raises:
        UserError: the file there is none of these.
    """
    rows = _read(directory)
    called = names if names is not None else {row.variant: row.variant for row in rows}
    return {_key(row, called[row.variant]): row.margin for row in rows if row.variant in called}


def to_ask(
    plain: str, variants: Sequence[Variant], records: Iterable[RequestRecord], known: Mapping[RequestKey, Margin]
) -> list[Difference]:
    """Differences from the plain server called `plain` of which no margin is known: its own, then the variants'."""
    rows: dict[tuple[str, str, int], list[RequestRecord]] = {}
    for record in records:
        rows.setdefault((record.variant, record.point, record.pass_index), []).append(record)
    audited = [v.name for v in variants if v.name != plain and audited_against(v, variants, BASELINE) == plain]
    found = []
    for (name, point, pass_index), own in list(rows.items()):
        if (name, pass_index) != (plain, 0):
            continue
        groups = [own_differences(own, rows.get((plain, point, CLOSING_PASS), []))]
        groups += [first_differences(rows.get((other, point, 0), []), own) for other in audited]
        for group in groups:
            askable = [d for d in group if _tokens(d)]
            found += [d for d in askable[:_MOST_A_POINT] if not _is_known(d, known)]
    return found


def ask_margins(endpoint: Endpoint, differences: Sequence[Difference], directory: Path) -> int:
    """Ask the plain server about each difference and add the answers to `margins.json`, all at once.

    Returns:
        How many were answered: a server that does not tell log-probabilities is asked once.
    """
    session = requests.Session()
    session.trust_env = False
    answered: list[MarginRow] = []
    for difference in differences:
        row = _ask(session, endpoint, difference)
        if row is None:
            break
        answered.append(row)
    if answered:
        rows = {_key(row, row.variant): row for row in (*_read(directory), *answered)}
        write_json(directory / MARGINS_FILE, MarginFile(margins=tuple(rows.values())))
    return len(answered)


def _read(directory: Path) -> tuple[MarginRow, ...]:
    path = directory / MARGINS_FILE
    return read_json(path, MarginFile, "margins of a bench run").margins if path.exists() else ()


def _key(row: MarginRow, variant: str) -> RequestKey:
    return RequestKey(variant, row.task, row.prompt_id, 0, row.repeat, row.point, row.pass_index)


def _is_known(difference: Difference, known: Mapping[RequestKey, Margin]) -> bool:
    margin = known.get(difference.mine.key)
    return margin is not None and margin.position == difference.position


def _tokens(difference: Difference) -> tuple[int, int] | None:
    """The plain server's token and the other one; None where one of the outputs had ended, or the prompt is unknown."""
    own, other, at = difference.mine.token_ids or (), difference.other.token_ids or (), difference.position
    if at >= min(len(own), len(other)) or not difference.other.prompt_token_ids:
        return None
    return other[at], own[at]


def _ask(session: requests.Session, endpoint: Endpoint, difference: Difference) -> MarginRow | None:
    tokens = _tokens(difference)
    assert tokens is not None, "differences without two tokens are not asked about"
    plain = difference.other
    body = {
        "model": endpoint.model,
        "prompt": [*(plain.prompt_token_ids or ()), *(plain.token_ids or ())[: difference.position]],
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": _TOP,
        "logprob_token_ids": list(tokens),
        "return_tokens_as_token_ids": True,
    }
    try:
        answer = session.post(f"{endpoint.base_url}/v1/completions", json=body, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()["choices"][0]["logprobs"]["top_logprobs"][0]
        known = {name: float(value) for name, value in told.items()}
        least = min(known.values())
        pair = [known.get(f"token_id:{token}", least) for token in tokens]
    except (requests.RequestException, ValueError, LookupError, TypeError, AttributeError):
        return None
    fields = {name: value for name, value in difference.mine.key._asdict().items() if name != "turn"}
    return MarginRow(**fields, position=difference.position, logprob=pair[0], other_logprob=pair[1])

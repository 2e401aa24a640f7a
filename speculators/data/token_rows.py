"""From rows of data files to token ids and loss masks, by several processes at once, in the order of the rows.

A conversation is one row of tokens with every answer supervised; only where a template rewrites earlier turns is it one
for each answer. The trap: processes are forked from a fresh one, because a tokenizer's threads do not survive a fork.
"""

import itertools
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from speculators.data.conversations import Conversation, Dropped, ReadyTokens, parse_row
from speculators.data.template import HistoryRewrittenError, TemplateRefusedError, tokenize_conversation
from speculators.errors import UserError
from speculators.verifier import Verifier

_ROWS_AT_ONCE = 64
_AHEAD = 4


class TokenRows(NamedTuple):
    """What became of a row of a data file.

    Attributes:
        tokens: ids int32 [T] and loss mask bool [T], not cut; several where the template rewrites earlier turns.
        exact: the row brought its tokens.
        without_reasoning: an answer has reasoning that the template leaves out, so nothing of it is learned.
    """

    conversation_id: str
    source: str
    tokens: list[tuple[np.ndarray, np.ndarray]]
    exact: bool = False
    without_reasoning: bool = False


def token_rows(verifier: Verifier, template_kwargs: dict[str, Any] | None, row: dict[str, Any]) -> TokenRows | Dropped:
    """Tokenise one row.

    Args:
        template_kwargs: arguments of the chat template; None: those that the row was made with.

    Raises:
        UserError: there is no chat template, or one that cannot be followed.
    """
    parsed = parse_row(row, verifier.made_with, template_kwargs)
    if isinstance(parsed, Dropped):
        return parsed
    if isinstance(parsed, ReadyTokens):
        return TokenRows(parsed.conversation_id, parsed.source, [(parsed.ids, parsed.loss_mask)], exact=True)
    try:
        tokens = _of_conversation(verifier, parsed)
    except TemplateRefusedError as error:
        return Dropped(f"refused by the chat template ({error})")
    return TokenRows(
        parsed.conversation_id, parsed.source, tokens, without_reasoning=_leaves_out_reasoning(verifier, parsed, tokens)
    )


def all_token_rows(
    verifier: Verifier, template_kwargs: dict[str, Any] | None, rows: Iterable[dict[str, Any]], workers: int
) -> Iterator[TokenRows | Dropped]:
    """`token_rows` of each row, in order; with `workers` > 1 in so many processes, a bounded number of rows ahead.

    Raises:
        UserError: as `token_rows`.
    """
    work = partial(token_rows, verifier, template_kwargs)
    if workers == 1:
        yield from map(work, rows)
        return
    fresh = multiprocessing.get_context("forkserver")
    fresh.set_forkserver_preload([__name__, "transformers.models.auto.tokenization_auto"])
    with ProcessPoolExecutor(workers, fresh, _start, (verifier, template_kwargs)) as pool:
        pending: deque[Future[list[TokenRows | Dropped]]] = deque()
        try:
            for batch in _batches(rows):
                pending.append(pool.submit(_work, batch))
                if len(pending) > _AHEAD * workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


_mine: list[tuple[Verifier, dict[str, Any] | None]] = []
"""Of a worker process: what it was started with."""


def _start(verifier: Verifier, template_kwargs: dict[str, Any] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    _mine.append((verifier, template_kwargs))


def _work(rows: list[dict[str, Any]]) -> list[TokenRows | Dropped]:
    return [token_rows(*_mine[0], row) for row in rows]


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    left = iter(rows)
    while batch := list(itertools.islice(left, _ROWS_AT_ONCE)):
        yield batch


def _of_conversation(verifier: Verifier, parsed: Conversation) -> list[tuple[np.ndarray, np.ndarray]]:
    """One row for the conversation, or one for each answer where the template rewrites earlier turns."""
    if not verifier.tokenizer.chat_template:
        raise UserError(f"--verifier: {verifier.path} has no chat template; give rows of `input_ids` with `loss_mask`.")

    def tokenize(length: int, only_last: bool) -> tuple[np.ndarray, np.ndarray]:
        return tokenize_conversation(
            verifier.tokenizer,
            parsed.messages[:length],
            parsed.finish_reason if length == len(parsed.messages) else None,
            eos_token_ids=verifier.eos_token_ids,
            only_last=only_last,
            tools=parsed.tools,
            template_kwargs=parsed.template_kwargs,
        )

    try:
        return [tokenize(len(parsed.messages), False)]
    except HistoryRewrittenError:
        answers = [i for i, message in enumerate(parsed.messages) if message["role"] == "assistant"]
    try:
        return [tokenize(i + 1, True) for i in answers]
    except HistoryRewrittenError as error:
        raise UserError(
            f"--verifier: the chat template of {verifier.path} changes the prompt once it is answered ({error}), "
            f"seen in conversation {parsed.conversation_id!r}; tokenise elsewhere, give `input_ids` with `loss_mask`."
        ) from None


def _leaves_out_reasoning(
    verifier: Verifier, parsed: Conversation, tokens: list[tuple[np.ndarray, np.ndarray]]
) -> bool:
    """Whether an answer's reasoning is nowhere in what is supervised."""
    reasoning = [str(message.get("reasoning_content") or "").strip() for message in parsed.messages]
    if not any(reasoning):
        return False
    written = "".join(verifier.tokenizer.decode(ids[mask]) for ids, mask in tokens)
    return any(thought not in written for thought in reasoning)

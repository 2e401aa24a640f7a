"""Tokens and loss mask of a conversation through the chat template: which tokens the verifier itself would write.

The prompt's tokens are exactly what vLLM's chat endpoint feeds: the rendered generation prompt, tokenised with
`add_special_tokens=False`. The trap: an answer's first newlines can merge with the prompt's last one when the whole
text is tokenised at once, so prompt and answer are then tokenised apart, as they are when serving.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np


class HistoryRewrittenError(Exception):
    """The template renders earlier messages differently once later ones follow (some drop earlier thinking)."""


class TemplateRefusedError(Exception):
    """The template itself refuses the conversation (roles that must alternate, an unsupported role)."""


def tokenize_conversation(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    finish_reason: str | None = None,
    *,
    eos_token_ids: Collection[int] = (),
    only_last: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a whole conversation, every answer supervised with the token that ends its turn.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        messages: `role` and `content`, the last one an assistant's.
        finish_reason: "length" leaves off the last end-of-turn token: the template adds it, the verifier did not.
        eos_token_ids: the tokens that end a turn; the tokenizer's own EOS if none are given.
        only_last: supervise the last answer alone; the history is then whatever the template makes of it.
        tools: that the assistant could call.
        template_kwargs: further arguments of the template.

    Returns:
        ids int32 [T] and loss_mask bool [T]; T ends with the last supervised token.

    Raises:
        HistoryRewrittenError: an answer's prompt is not a prefix of the rendered conversation.
        TemplateRefusedError: the template raised.
    """
    ends = set(eos_token_ids) or {tokenizer.eos_token_id}
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    arguments = {"tools": list(tools) if tools else None, **(template_kwargs or {})}
    ids: list[int] = []
    mask: list[bool] = []
    text = ""
    for i in answers[-1:] if only_last else answers:
        prompt = _render(tokenizer, messages[:i], add_generation_prompt=True, **arguments)
        answered = _render(tokenizer, messages[: i + 1], add_generation_prompt=False, **arguments)
        if not (prompt.startswith(text) and answered.startswith(prompt)):
            raise HistoryRewrittenError(_first_difference(text, prompt) or _first_difference(prompt, answered))
        context = _extend(tokenizer, ids, text, prompt)
        whole = _extend(tokenizer, context, prompt, answered)
        answer = whole[len(context) :]
        written = _written(tokenizer, answer, ends)
        if i == answers[-1] and finish_reason == "length" and written and answer[written - 1] in ends:
            written -= 1
        mask += [False] * (len(context) - len(mask)) + [True] * written + [False] * (len(answer) - written)
        ids, text = whole, answered
    length = max((t + 1 for t, supervised in enumerate(mask) if supervised), default=0)
    return np.array(ids[:length], dtype=np.int32), np.array(mask[:length], dtype=np.bool_)


def _render(tokenizer: Any, messages: Sequence[dict[str, Any]], **template_arguments: Any) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **template_arguments))
    except TemplateError as error:
        raise TemplateRefusedError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None


def _extend(tokenizer: Any, ids: list[int], text: str, longer: str) -> list[int]:
    """Tokens of `longer`, which starts with `text`, beginning with `ids`, the tokens of `text`."""
    whole = _tokens(tokenizer, longer)
    return whole if whole[: len(ids)] == ids else ids + _tokens(tokenizer, longer[len(text) :])


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _written(tokenizer: Any, answer: list[int], ends: Collection[int]) -> int:
    """How many tokens of a rendered answer the verifier writes: through its last end-of-turn token, or, where the
    template has none, through the last token that is not white space."""
    for t in reversed(range(len(answer))):
        if answer[t] in ends:
            return t + 1
    written = len(answer)
    while written and not tokenizer.decode([answer[written - 1]]).strip():
        written -= 1
    return written


def _first_difference(expected: str, seen: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, seen, strict=False)) if a != b), min(len(expected), len(seen))
    )
    return "" if seen.startswith(expected) else f"{expected[at : at + 40]!r} became {seen[at : at + 40]!r}"

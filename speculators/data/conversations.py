"""Conversations out of the rows of data files, in the four shapes that people have.

Each row becomes a `Conversation` (roles and text), `ReadyTokens` (already tokenised), or a `Dropped` with the reason,
which is counted and shown: a row never vanishes silently.
"""

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

ROW_SHAPES = (
    "`messages` (role, content), `conversations` (from, value or role, content), `prompt` with `response`, "
    "or `input_ids` with `loss_mask`"
)
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}


class Conversation(NamedTuple):
    """One conversation as text.

    Attributes:
        conversation_id: the row's `id`, or a hash of its first user message.
        source: the row's `source`, "" if it has none.
        messages: dicts with `role` (system, user, assistant, tool) and `content`, as a chat template takes them; an
            assistant's may have `reasoning_content` and `tool_calls` beside.
        finish_reason: "length" when the last answer was cut at a token limit, so its end of turn was never written.
        tools: the functions that the assistant could call, as a chat template takes them.
        template_kwargs: further arguments of the chat template.
    """

    conversation_id: str
    source: str
    messages: list[dict[str, Any]]
    finish_reason: str | None
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}


class ReadyTokens(NamedTuple):
    """A row that was tokenised elsewhere: `ids` int32 [T], `loss_mask` bool [T]."""

    conversation_id: str
    source: str
    ids: np.ndarray
    loss_mask: np.ndarray


class Dropped(NamedTuple):
    """A row that cannot be used, and why."""

    reason: str


def parse_row(
    row: dict[str, Any], made_with: str | None = None, template_kwargs: dict[str, Any] | None = None
) -> Conversation | ReadyTokens | Dropped:
    """Recognise a row's shape. Messages after the last answer are left off: nobody wrote a target there.

    Args:
        row: one object of a data file.
        made_with: `Verifier.made_with` of the verifier that the data are for: ready tokens of a row that names another
            are passed over, its text is used. None trusts them all.
        template_kwargs: arguments of the chat template, which pass over ready tokens that were made with others; None
            takes those that the row was made with.
    """
    own_kwargs = row.get("chat_template_kwargs") or {}
    if row.get("input_ids") is not None and row.get("loss_mask") is not None:
        same_kwargs = template_kwargs is None or "made_with" not in row or own_kwargs == template_kwargs
        if same_kwargs and (made_with is None or row.get("made_with", made_with) == made_with):
            return _ready(row)
        if not (row.get("messages") or row.get("conversations") or row.get("prompt")):
            return Dropped("tokens of another verifier or chat template, and no text")
    messages = to_messages(row, with_response=True)
    if isinstance(messages, Dropped):
        return messages
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        return Dropped("no answer of an assistant")
    if next(message["role"] for message in messages if message["role"] != "system") == "assistant":
        return Dropped("begins with an answer")
    return Conversation(
        conversation_id(row, messages),
        str(row.get("source") or ""),
        messages,
        row.get("finish_reason"),
        tools_of(row),
        own_kwargs if template_kwargs is None else template_kwargs,
    )


def tools_of(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The row's `tools`, also when they are JSON text, as data sets hold them; None if there are none."""
    tools = _from_json(row.get("tools"))
    return tools if isinstance(tools, list) and tools else None


def to_messages(row: dict[str, Any], *, with_response: bool) -> list[dict[str, Any]] | Dropped:
    """The row's messages in `role` / `content` form; `with_response=False` takes a `prompt` alone."""
    turns = row.get("messages") or row.get("conversations")
    if turns:
        return _normalise(turns)
    prompt, response = row.get("prompt"), row.get("response")
    if isinstance(prompt, list):
        answered = with_response and response is not None
        return _normalise([*prompt, {"role": "assistant", "content": response}] if answered else prompt)
    question = _text(prompt)
    if question is None:
        return Dropped(f"none of the known shapes (keys seen: {', '.join(sorted(map(str, row))) or 'none'})")
    user = {"role": "user", "content": question}
    if not with_response:
        return [user]
    answer = _text(response)
    if answer is None:
        return Dropped("`prompt` without a `response`")
    return [user, {"role": "assistant", "content": answer}]


def conversation_id(row: dict[str, Any], messages: Iterable[dict[str, Any]]) -> str:
    """The row's `id`, else 16 hex digits over the first user message; the split and resuming go by it."""
    if row.get("id") is not None:
        return str(row["id"])
    first = next((message["content"] for message in messages if message["role"] == "user"), "")
    return hashlib.sha256(first.encode()).hexdigest()[:16]


def _normalise(turns: Any) -> list[dict[str, Any]] | Dropped:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        return Dropped("its messages are not a list of objects")
    messages = []
    for turn in turns:
        name = turn.get("role", turn.get("from"))
        role = ROLES.get(str(name).lower())
        if role is None:
            return Dropped(f"unknown role {name!r}")
        said = turn["content"] if "content" in turn else turn.get("value")
        calls = _from_json(turn.get("tool_calls"))
        content = _text("" if said is None and calls else said)
        if content is None:
            return Dropped("a message without text")
        kept = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
        if calls:
            kept["tool_calls"] = [_with_arguments(call) for call in calls]
        if turn.get("reasoning") and not turn.get("reasoning_content"):
            kept["reasoning_content"] = turn["reasoning"]  # the newer name; templates read the older one
        messages.append({**kept, "role": role, "content": content})
    return messages


def _with_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, as vLLM hands it to the template, and not OpenAI's text of one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _from_json(function.get("arguments"))}}


def _from_json(value: Any) -> Any:
    """What a text of JSON says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _text(content: Any) -> str | None:
    """A string as it is, a list of OpenAI's text parts joined, None for anything else. Half a surrogate pair, which no
    tokenizer takes, becomes "?"."""
    if (
        isinstance(content, list)
        and content
        and all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    ):
        content = "".join(str(part.get("text", "")) for part in content)
    return content.encode("utf-8", "replace").decode() if isinstance(content, str) else None


def _ready(row: dict[str, Any]) -> ReadyTokens | Dropped:
    try:
        ids, mask = np.asarray(row["input_ids"], dtype=np.int64), np.asarray(row["loss_mask"], dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return Dropped("`input_ids` or `loss_mask` is not a list of integers")
    if ids.ndim != 1 or ids.shape != mask.shape:
        return Dropped("`input_ids` and `loss_mask` differ in length")
    name = row.get("id")
    unnamed = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()[:16]
    return ReadyTokens(
        unnamed if name is None else str(name), str(row.get("source") or ""), ids.astype(np.int32), mask != 0
    )

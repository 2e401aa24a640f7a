"""Many requests in flight to an OpenAI-compatible endpoint: an answered conversation each, or the reason why not."""

import queue
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from speculators.errors import UserError

RETRIES = 3
REQUEST_TIMEOUT_S = 600


class Pending(NamedTuple):
    """A prompt without an answer: the user's turns (and the system's), without any assistant's, and the tools that the
    verifier may call."""

    conversation_id: str
    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class Answered(NamedTuple):
    """A conversation whose every asked turn is answered; token counts are summed over its requests.

    Attributes:
        input_ids, loss_mask: the very tokens that the verifier read and wrote, 1 where it wrote. Text does not always
            tokenise back into them. None when the server tells no ids, or renders earlier turns anew later on.
    """

    messages: list[dict[str, Any]]
    finish_reason: str
    completion_tokens: int
    prompt_tokens: int
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None


class Failed(NamedTuple):
    """What the endpoint said, after retries."""

    error: str


def answer_all(
    pending: Sequence[Pending], *, base_url: str, model: str, concurrency: int, request: dict[str, Any]
) -> Iterator[tuple[Pending, Answered | Failed]]:
    """Outcomes in the order they come; `request` is what every request says beside model, messages and tools.

    Threads are daemons: Ctrl-C ends the program without waiting for the requests in flight.

    Raises:
        UserError: the endpoint cannot be reached any more.
    """
    import openai

    url = f"{base_url.rstrip('/')}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=RETRIES, timeout=REQUEST_TIMEOUT_S)
    ask = _with_token_ids(partial(client.chat.completions.create, model=model), request)
    todo: queue.SimpleQueue[Pending] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Pending, Answered | Failed | UserError]] = queue.SimpleQueue()
    stop = threading.Event()
    for prompt in pending:
        todo.put(prompt)

    def work() -> None:
        while not stop.is_set():
            try:
                prompt = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((prompt, _converse(ask, prompt)))
            except openai.APIConnectionError as error:
                done.put((prompt, UserError(f"{base_url}: does not answer ({error.__cause__ or error})")))
            except Exception as error:  # whatever a server can answer: it is listed, never lost
                done.put((prompt, Failed(f"{type(error).__name__}: {error}")))

    for _ in range(min(concurrency, len(pending))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in pending:
            prompt, outcome = done.get()
            if isinstance(outcome, UserError):
                raise UserError(f"{outcome}; the answers so far are kept, start the same command to continue.")
            yield prompt, outcome
    finally:
        stop.set()


def _with_token_ids(create: Any, request: dict[str, Any]) -> Any:
    """Ask for token ids, which vLLM gives; a server that refuses the unknown option is not asked for them again."""
    import openai

    refused = threading.Event()

    def ask(**said: Any) -> Any:
        if not refused.is_set():
            try:
                return create(**said, extra_body={**request, "return_token_ids": True})
            except openai.BadRequestError as error:
                if "return_token_ids" not in str(error):
                    raise
                refused.set()
        return create(**said, extra_body=request)

    return ask


def _converse(ask: Any, prompt: Pending) -> Answered:
    """Answer each user turn in turn. An answer cut at its limit ends the conversation, because the verifier would not
    have gone on from there, and so does a call of a tool, whose result nobody knows."""
    messages: list[dict[str, Any]] = []
    completion_tokens = prompt_tokens = 0
    finish_reason = "stop"
    tokens = _Tokens([], [], exact=True)
    tools = {"tools": prompt.tools} if prompt.tools else {}
    for message in prompt.messages:
        messages.append({"role": message["role"], "content": message["content"]})
        if message["role"] != "user":
            continue
        response = ask(messages=messages, **tools)
        choice = response.choices[0]
        finish_reason = choice.finish_reason
        if finish_reason not in ("stop", "length", "tool_calls"):
            raise ValueError(f"the answer ended with {finish_reason!r}, neither complete nor at its limit")
        messages.append(_as_said(choice.message))
        completion_tokens += response.usage.completion_tokens
        prompt_tokens += response.usage.prompt_tokens
        tokens = tokens.then(getattr(response, "prompt_token_ids", None), getattr(choice, "token_ids", None))
        if finish_reason != "stop":
            break
    ids, mask = (tokens.ids, tokens.mask) if tokens.exact else (None, None)
    return Answered(messages, finish_reason, completion_tokens, prompt_tokens, ids, mask)


def _as_said(message: Any) -> dict[str, Any]:
    """An answer as a chat template takes it: reasoning that the server told apart, and calls, under their own keys."""
    said: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    if reasoning:
        said["reasoning_content"] = reasoning
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    return said


class _Tokens(NamedTuple):
    """What the verifier has read and written so far; `exact` as long as every request told it and went on from it."""

    ids: list[int]
    mask: list[int]
    exact: bool

    def then(self, prompt: list[int] | None, answer: list[int] | None) -> "_Tokens":
        if not self.exact or not prompt or not answer or prompt[: len(self.ids)] != self.ids:
            return self._replace(exact=False)
        read = [0] * (len(prompt) - len(self.ids))
        return _Tokens([*prompt, *answer], [*self.mask, *read, *[1] * len(answer)], exact=True)

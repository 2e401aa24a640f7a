"""One streamed chat request, timed. The trap: under speculation a chunk holds several tokens, so the time per output
token comes from the token count in the usage chunk, never from counting chunks.

Bytes are stamped as they arrive and read afterwards: what is done between two stamps is what makes other streams late.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.records import RequestKey, RequestRecord
from bench.stream import Stream, one_line

if TYPE_CHECKING:
    from aiohttp import ClientSession

REQUEST_TIMEOUT_S = 600.0
_LINES_AT_ONCE = 16  # some 0.2 ms of reading, then the other streams have their turn
_TOO_LONG = ("maximum context length", "maximum model length", "context_length_exceeded")


class Sampling(NamedTuple):
    """What is asked of the server beside the messages.

    Attributes:
        thinking: told to the chat template; None tells it nothing.
        cache_salt: prompts of different salts share no prefix cache (vLLM's request field of this name).
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    thinking: Literal["on", "off"] | None = None
    cache_salt: str | None = None


def make_client(base_url: str) -> "ClientSession":
    """A client of the server whose root is `base_url` (without `/v1`), to be made inside a running event loop.

    It opens as many connections as there are streams, knows no proxies and never repeats a request behind our back.
    """
    from aiohttp import ClientSession, ClientTimeout, TCPConnector, TraceConfig

    timeout = ClientTimeout(total=None, sock_read=REQUEST_TIMEOUT_S)
    trace = TraceConfig()
    trace.on_request_chunk_sent.append(_note_sending)
    return ClientSession(
        base_url, connector=TCPConnector(limit=0), timeout=timeout, trust_env=False, trace_configs=[trace]
    )


async def _note_sending(_session: Any, context: Any, _params: Any) -> None:
    """The body goes out now: what came before (finding a connection, making headers) is the client's own time."""
    context.trace_request_ctx["sent"] = time.perf_counter()


async def send(
    client: "ClientSession",
    model: str,
    messages: Sequence[dict[str, str]],
    key: RequestKey,
    sampling: Sampling,
    *,
    origin: float,
    due: float | None = None,
) -> RequestRecord:
    """Send one request and time its stream. Whatever goes wrong becomes the record's `error`.

    Args:
        origin: `time.perf_counter()` at the start of the variant's measurement.
        due: when it should have been sent; its times count from there. None means now.
    """
    from aiohttp import ClientError

    arrived: list[tuple[float, bytes]] = []
    error: str | None = None
    too_long = False
    context = {"sent": time.perf_counter()}
    body = _body(model, messages, sampling)
    try:
        async with client.post("/v1/chat/completions", json=body, trace_request_ctx=context) as response:
            if response.status == 200:
                async for data in response.content.iter_any():
                    arrived.append((time.perf_counter(), data))
            else:
                error = _refusal(response.status, await response.text(errors="replace"))
                too_long = 400 <= response.status < 500 and any(words in error for words in _TOO_LONG)
    except (ClientError, TimeoutError, OSError) as problem:
        error = one_line(problem)
    stream = Stream()
    error = error or await _read(arrived, stream) or stream.problem()
    if too_long:
        error = f"skipped: prompt and answer do not fit the server's context ({error})"
    sent = context["sent"]
    counted_from = sent if due is None else due
    record = stream.record(key, counted_from, counted_from - origin, error)
    return record.model_copy(update={"late_s": round(sent - counted_from, 6), "skipped": too_long})


def _body(model: str, messages: Sequence[dict[str, str]], sampling: Sampling) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": list(messages),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if (
        sampling.temperature > 0
    ):  # vLLM makes a generator for each request that names a seed; greedy decoding needs none
        body["seed"] = sampling.seed
    if sampling.thinking:
        body["chat_template_kwargs"] = {"enable_thinking": sampling.thinking == "on"}
    if sampling.cache_salt:
        body["cache_salt"] = sampling.cache_salt
    return body


async def _read(arrived: Sequence[tuple[float, bytes]], stream: Stream) -> str | None:
    """Take server-sent events apart; an event's time is when its line was complete. Returns what is wrong with them."""
    rest = b""
    lines_read = 0
    for at, data in arrived:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                return None
            try:
                stream.add(json.loads(text), at)
            except (ValueError, AttributeError, TypeError):
                return f"the server sent an event that is no chunk: {text[:100].decode(errors='replace')}"
            lines_read += 1
            if lines_read % _LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
    return None


def _refusal(status: int, text: str) -> str:
    """Status and the server's own words."""
    try:
        said = json.loads(text)
        said = said.get("error", said) if isinstance(said, dict) else said
        said = said.get("message", said) if isinstance(said, dict) else said
    except ValueError:
        said = text
    return f"status {status}: {' '.join(str(said).split()) or 'no message'}"[:500]

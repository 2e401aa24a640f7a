"""One streamed chat request, timed. The trap: under speculation a chunk holds several tokens, so the time per output
token comes from the token count in the usage chunk, never from counting chunks.
"""

import time
from typing import TYPE_CHECKING, Any

from bench.records import RequestKey, RequestRecord
from speculators.acceptance import Acceptance

if TYPE_CHECKING:
    from openai import AsyncOpenAI

REQUEST_TIMEOUT_S = 600.0
_MICROSECOND_DIGITS = 6


def make_client(base_url: str) -> "AsyncOpenAI":
    """A client of the server whose root is `base_url` (without `/v1`). It never repeats a request behind our back."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)


async def send(
    client: "AsyncOpenAI",
    model: str,
    messages: list[dict[str, str]],
    key: RequestKey,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    origin: float,
) -> RequestRecord:
    """Send one request and time its stream. Whatever goes wrong becomes the record's `error`.

    Args:
        origin: `time.perf_counter()` at the start of the variant's measurement.
    """
    import httpx
    from openai import OpenAIError

    stream = Stream()
    error: str | None = None
    sent = time.perf_counter()
    try:
        create: Any = client.chat.completions.create  # its overloads want typed messages
        response = await create(
            model=model,
            messages=messages,
            max_tokens=max_tokens,
            temperature=temperature,
            stream=True,
            stream_options={"include_usage": True},
            # vLLM seeds a generator for each request that names one, which greedy decoding does not need
            extra_body={"return_token_ids": True} | ({"seed": seed} if temperature > 0 else {}),
        )
        async for chunk in response:
            stream.add(chunk, time.perf_counter())
        error = stream.problem()
    except (OpenAIError, httpx.HTTPError) as problem:
        error = _one_line(problem)
    return stream.record(key, sent, sent - origin, error)


class Stream:
    """What the chunks of one answer add up to; knows no clock, so that its arithmetic can be checked exactly."""

    def __init__(self) -> None:
        self.times: list[float] = []  # arrival of every chunk that carried a token
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.prompt_token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.finished_at: float | None = None
        self.usage: Any = None
        self.speculation: dict[str, Any] | None = None
        self.server_error: str | None = None

    def add(self, chunk: Any, now: float) -> None:
        """Take in a chunk of the OpenAI client that arrived at `now` (seconds)."""
        extra = chunk.model_extra or {}
        if "error" in extra:  # vLLM reports an error inside a running stream as a chunk of its own
            self.server_error = str(extra["error"])
        self.usage = chunk.usage or self.usage
        self.prompt_token_ids = extra.get("prompt_token_ids") or self.prompt_token_ids  # vLLM: on the first chunk only
        self.speculation = (extra.get("metrics") or {}).get("speculative_decoding") or self.speculation
        for choice in chunk.choices or ():
            self._add_choice(choice, now)

    def _add_choice(self, choice: Any, now: float) -> None:
        delta = choice.delta
        more = delta.model_extra or {}
        text = (more.get("reasoning") or more.get("reasoning_content") or "") + (delta.content or "")
        ids = (choice.model_extra or {}).get("token_ids") or []
        if text or ids:
            self.times.append(now)
            self.tokens.append(len(ids))
        self.text.append(text)
        self.token_ids += ids
        if choice.finish_reason:
            self.finish_reason, self.finished_at = choice.finish_reason, now

    def problem(self) -> str | None:
        """Why the stream, which ended by itself, is not a whole answer."""
        if self.server_error:
            return f"the server reported an error in the stream: {self.server_error}"
        if self.finish_reason is None:
            return "the stream ended before the answer was finished"
        if self.usage is None:
            return "the server sent no usage, so its output tokens are unknown"
        return None

    def record(self, key: RequestKey, sent: float, started_s: float, error: str | None) -> RequestRecord:
        """The row: times relative to `sent`, none of them if there was an error."""
        count = self.usage.completion_tokens if self.usage else None
        span = self._first_and_last()
        error = error or (None if span else "the answer has no token")
        timed = span is not None and error is None
        first, last = span if span and timed else (sent, sent)
        speculation = self.speculation or {}
        steps = speculation.get("acceptance_histogram")
        return RequestRecord(
            **key._asdict(),
            error=error,
            started_s=_rounded(started_s),
            ttft_s=_rounded(first - sent) if timed else None,
            tpot_s=(last - first) / (count - 1) if timed and count and count > 1 else None,
            e2e_s=_rounded(last - sent) if timed else None,
            chunk_gaps_s=tuple(_rounded(b - a) for a, b in zip(self.times, self.times[1:], strict=False)),
            chunk_tokens=tuple(self.tokens) if self.token_ids else (),
            prompt_tokens=self.usage.prompt_tokens if self.usage else None,
            output_tokens=count,
            finish_reason=self.finish_reason,
            text="".join(self.text),
            token_ids=tuple(self.token_ids) or None,
            prompt_token_ids=tuple(self.prompt_token_ids) or None,
            acceptance=Acceptance(histogram=tuple(steps), drafted=speculation["num_draft_tokens"]) if steps else None,
            accepted_per_step=tuple(speculation.get("per_step_accepted") or ()),
            drafted_per_step=tuple(speculation.get("per_step_drafted") or ()),
        )

    def _first_and_last(self) -> tuple[float, float] | None:
        """Arrival of the first and the last token. An end-of-text token has no text: without token ids only the
        finishing chunk tells when it came."""
        times = self.times or ([self.finished_at] if self.finished_at else [])
        if not times:
            return None
        return times[0], times[-1] if self.token_ids else max(times[-1], self.finished_at or 0.0)


def _rounded(seconds: float) -> float:
    return round(seconds, _MICROSECOND_DIGITS)


def _one_line(problem: Exception) -> str:
    text = " ".join(str(problem).split()) or "no message"
    cause = problem.__cause__
    detail = f" ({' '.join(str(cause).split())})" if cause and str(cause) and str(cause) not in text else ""
    return f"{type(problem).__name__}: {text}{detail}"[:500]

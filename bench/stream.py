"""What the chunks of one answer add up to. It knows no clock, so that its arithmetic can be checked exactly."""

from typing import Any

from bench.records import RequestKey, RequestRecord
from speculators.acceptance import Acceptance

_MICROSECOND_DIGITS = 6


class Stream:
    """Takes in chunks in the form of OpenAI's `chat.completion.chunk` objects, with vLLM's additions if there are."""

    def __init__(self) -> None:
        self.times: list[float] = []  # arrival of every chunk that carried a token
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.prompt_token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.finished_at: float | None = None
        self.usage: dict[str, Any] | None = None
        self.speculation: dict[str, Any] | None = None
        self.server_error: str | None = None

    def add(self, chunk: dict[str, Any], now: float) -> None:
        """Take in a chunk that arrived at `now` (seconds)."""
        if "error" in chunk:  # vLLM reports an error inside a running stream as a chunk of its own
            self.server_error = str(chunk["error"])
        self.usage = chunk.get("usage") or self.usage
        self.prompt_token_ids = chunk.get("prompt_token_ids") or self.prompt_token_ids  # vLLM: on the first chunk only
        self.speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or self.speculation
        for choice in chunk.get("choices") or ():
            self._add_choice(choice, now)

    def _add_choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta") or {}
        text = (delta.get("reasoning") or delta.get("reasoning_content") or "") + (delta.get("content") or "")
        ids = choice.get("token_ids") or []
        if text or ids:
            self.times.append(now)
            self.tokens.append(len(ids))
        self.text.append(text)
        self.token_ids += ids
        if choice.get("finish_reason"):
            self.finish_reason, self.finished_at = choice["finish_reason"], now

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
        usage = self.usage or {}
        count = usage.get("completion_tokens")
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
            prompt_tokens=usage.get("prompt_tokens"),
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


def one_line(problem: BaseException) -> str:
    """An exception as its name, words and cause."""
    text = " ".join(str(problem).split()) or "no message"
    cause = problem.__cause__
    detail = f" ({' '.join(str(cause).split())})" if cause and str(cause) and str(cause) not in text else ""
    return f"{type(problem).__name__}: {text}{detail}"[:500]


def _rounded(seconds: float) -> float:
    return round(seconds, _MICROSECOND_DIGITS)

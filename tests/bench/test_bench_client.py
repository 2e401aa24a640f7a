"""The client's arithmetic against a scripted server: several tokens a chunk, missing usage, drops and errors."""

import asyncio
import json
import time
from typing import Any

import pytest
from scripted_server import Script, chunk, server, usage

from bench.client import Sampling, _read, make_client, send
from bench.records import RequestKey, RequestRecord
from bench.stream import Stream
from speculators.acceptance import Acceptance

KEY = RequestKey("dflash", "gsm8k", "0", 0, 0)
DELAY_S = 0.01


def ask(script: Script, sampling: Sampling = Sampling(32)) -> RequestRecord:
    async def once(url: str) -> RequestRecord:
        async with make_client(url) as client:
            messages = [{"role": "user", "content": "hi"}]
            return await send(client, "m", messages, KEY, sampling, origin=time.perf_counter())

    with server(script) as url:
        return asyncio.run(once(url))


SPECULATION = {
    "acceptance_histogram": [1, 0, 1, 1],
    "num_draft_tokens": 9,
    "num_spec_steps": 3,
    "per_step_accepted": [2, 0, 3],
    "per_step_drafted": [3, 3, 3],
}


def speculative() -> Script:
    """One token from the prefill, then steps of 3, 1 and 4 tokens: 9 tokens in 4 chunks, the last one end-of-text."""
    first = {**chunk(""), "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    first["prompt_token_ids"] = [11, 12, 13, 14, 15, 16, 17]
    said = [("a", [1]), ("bcd", [2, 3, 4]), ("e", [5])]
    last = [chunk("fgh", [6, 7, 8, 0], "stop"), usage(9, metrics={"speculative_decoding": SPECULATION})]
    return Script([(DELAY_S, event) for event in (first, *(chunk(*one) for one in said), *last, "[DONE]")])


def heard(*events: tuple[float, Any]) -> RequestRecord:
    """The record of a request sent at 10.0 s whose chunks arrive at the given seconds after that."""
    stream = Stream()
    for at, event in events:
        stream.add(event, 10.0 + at)
    return stream.record(KEY, 10.0, 0.0, stream.problem())


def test_time_per_token_comes_from_the_token_count_not_from_chunks() -> None:
    record = heard(
        (0.2, chunk("")),
        (0.5, chunk("a", [1])),
        (0.6, chunk("bcd", [2, 3, 4])),
        (0.7, chunk("e", [5])),
        (0.9, chunk("fgh", [6, 7, 8, 0], "stop")),
        (3.0, usage(9)),
    )
    assert record.ok
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx((0.9 - 0.5) / 8)
    assert record.e2e_s == pytest.approx(0.9)
    assert record.chunk_gaps_s == pytest.approx((0.1, 0.1, 0.2))


def test_a_server_without_token_ids_gives_the_same_times() -> None:
    record = heard((0.5, chunk("a")), (0.6, chunk("bcd")), (0.9, chunk("e", None, "length")), (3.0, usage(5)))
    assert record.token_ids is record.prompt_token_ids is None
    assert record.chunk_tokens == ()
    assert record.tpot_s == pytest.approx(0.4 / 4)


def test_a_finishing_chunk_without_text_is_the_time_of_the_last_token() -> None:
    record = heard((0.5, chunk("a")), (0.6, chunk("b")), (0.9, chunk("", None, "stop")), (3.0, usage(3)))
    assert record.tpot_s == pytest.approx(0.4 / 2)
    assert record.e2e_s == pytest.approx(0.9)


def test_a_token_without_text_is_a_token() -> None:
    """Half of a character has an id and no text yet."""
    record = heard((0.5, chunk(None, [1])), (0.7, chunk("é", [2], "stop")), (0.8, usage(2)))
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.2)


def test_one_token_has_no_time_per_token() -> None:
    record = heard((0.5, chunk("a", [1], "length")), (0.6, usage(1)))
    assert record.ok
    assert record.tpot_s is None
    assert record.ttft_s == record.e2e_s == pytest.approx(0.5)


def test_an_answer_that_ends_at_once_is_timed_by_its_end() -> None:
    record = heard((0.5, chunk("", None, "stop")), (0.6, usage(1)))
    assert record.ok
    assert record.ttft_s == record.e2e_s == pytest.approx(0.5)


def test_a_streamed_answer_is_kept_whole() -> None:
    record = ask(speculative())
    assert record.ok
    assert record.output_tokens == 9
    assert record.ttft_s is not None
    assert record.tpot_s is not None
    assert record.e2e_s is not None
    assert record.ttft_s >= DELAY_S
    assert record.tpot_s * 8 == pytest.approx(record.e2e_s - record.ttft_s, abs=1e-5)
    assert sum(record.chunk_gaps_s) == pytest.approx(record.e2e_s - record.ttft_s, abs=1e-5)
    assert record.text == "abcdefgh"
    assert record.token_ids == (1, 2, 3, 4, 5, 6, 7, 8, 0)
    assert record.chunk_tokens == (1, 3, 1, 4)
    assert record.acceptance == Acceptance(histogram=(1, 0, 1, 1), drafted=9)
    assert record.accepted_per_step == (2, 0, 3)
    assert record.finish_reason == "stop"
    assert record.prompt_tokens == 7
    assert record.prompt_token_ids == (11, 12, 13, 14, 15, 16, 17)


def test_empty_chunks_are_not_tokens() -> None:
    events = [
        (0.0, chunk("")),
        (0.0, chunk(None)),
        (0.0, chunk("a", [1])),
        (0.0, chunk("", [])),
        (0.0, chunk("b", [2], "length")),
    ]
    record = ask(Script([*events, (0.0, usage(2)), (0.0, "[DONE]")]))
    assert record.ok
    assert len(record.chunk_gaps_s) == 1
    assert record.chunk_tokens == (1, 1)


def test_an_empty_answer_is_an_answer() -> None:
    record = ask(Script([(0, chunk("", [0], "stop")), (0, usage(1)), (0, "[DONE]")]))
    assert record.ok
    assert record.text == ""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (Script([(0, chunk("a")), (0, chunk("b", None, "stop")), (0, "[DONE]")]), "no usage"),
        (Script([(0, chunk("a")), (0, chunk("b"))], drop=True), ""),
        (Script([(0, chunk("a")), (0, "[DONE]")]), "ended before"),
        (Script([], status=500), "500"),
        (Script([], status=429), "429"),
        (Script([], status=400), "out of memory"),
        (Script([(0, chunk("a")), (0, {"error": {"message": "engine died", "code": 500}})]), "engine died"),
    ],
)
def test_whatever_goes_wrong_is_a_recorded_failure_without_times(script: Script, said: str) -> None:
    record = ask(script)
    assert record.error is not None
    assert said in record.error
    assert record.ttft_s is record.tpot_s is record.e2e_s is None
    assert len(script.requests) == 1, "a failed request is not repeated behind our back"


def test_no_server_is_a_recorded_failure() -> None:
    async def once() -> RequestRecord:
        async with make_client("http://127.0.0.1:9") as client:
            return await send(client, "m", [{"role": "user", "content": "hi"}], KEY, Sampling(2), origin=0.0)

    assert asyncio.run(once()).error is not None


@pytest.mark.parametrize("event", ["{half", '"a text"', '{"choices": 7}'])
def test_an_event_that_is_no_chunk_is_a_failure_that_shows_it(event: str) -> None:
    record = ask(Script([(0, chunk("a")), (0, event), (0, "[DONE]")]))
    assert record.error is not None
    assert event in record.error


def test_a_prompt_that_does_not_fit_the_context_is_skipped() -> None:
    script = Script([], status=400)
    script.message = "This model's maximum context length is 512 tokens. However, you requested 700 tokens."
    record = ask(script)
    assert record.skipped
    assert not record.ok
    assert record.error is not None
    assert "maximum context length is 512" in record.error
    script.status = 500
    assert not ask(script).skipped


def test_latencies_count_from_when_the_request_was_due() -> None:
    async def once(url: str) -> RequestRecord:
        async with make_client(url) as client:
            now = time.perf_counter()
            messages = [{"role": "user", "content": "hi"}]
            return await send(client, "m", messages, KEY, Sampling(32), origin=now - 10, due=now - 3)

    with server(speculative()) as url:
        record = asyncio.run(once(url))
    assert record.started_s == pytest.approx(7)
    assert record.ttft_s is not None
    assert record.e2e_s is not None
    assert 3 <= record.late_s <= record.ttft_s <= record.e2e_s
    assert sum(record.chunk_gaps_s) < 3


def test_an_event_cut_anywhere_is_read_whole_and_timed_by_its_end() -> None:
    events = [chunk("a", [1]), chunk("b\u2028c", [2], "stop"), usage(2)]
    whole = b"".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode() for event in events)
    first_end = whole.index(b"\n") + 1
    for cut in range(1, first_end + 20):
        stream = Stream()
        assert asyncio.run(_read([(1.0, whole[:cut]), (2.0, whole[cut:])], stream)) is None
        assert stream.times == [1.0 if cut >= first_end else 2.0, 2.0]
        assert "".join(stream.text) == "ab\u2028c"


def test_what_is_asked_for() -> None:
    script = speculative()
    ask(script)
    ask(script, Sampling(8, temperature=0.7, seed=5, thinking="off", cache_salt="s"))
    greedy, sampled = script.requests
    assert greedy["stream_options"] == {"include_usage": True}
    assert greedy["return_token_ids"] is True
    assert greedy["max_tokens"] == 32
    assert not {"seed", "chat_template_kwargs", "cache_salt"} & greedy.keys()
    assert (sampled["seed"], sampled["cache_salt"]) == (5, "s")
    assert sampled["chat_template_kwargs"] == {"enable_thinking": False}

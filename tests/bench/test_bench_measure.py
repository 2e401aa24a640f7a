"""One server's measurement: order, turns, continuation, failures and the server's death."""

from pathlib import Path

import pytest
from rich.console import Console
from scripted_server import Script, chunk, server, usage

from bench.client_lag import ClientLag
from bench.conditions import Point
from bench.load import Load, arrival_times_s
from bench.measure import measure, missing
from bench.prompts import Prompt
from bench.records import RecordWriter, RequestKey, RequestRecord, finished_keys, read_records
from bench.suite import BenchOptions, Plan
from bench.traffic import Finished
from serve.endpoint import Endpoint
from speculators.acceptance import Acceptance
from speculators.errors import UserError

WARM_UPS = 2


def prompts(count: int, turns: int = 1) -> list[Prompt]:
    follow_ups = tuple(f"and {i}?" for i in range(1, turns))
    return [Prompt(str(i), ({"role": "user", "content": f"question {i}"},), follow_ups) for i in range(count)]


def answer() -> Script:
    return Script([(0, chunk("yes", [1])), (0, chunk(".", [2], "stop")), (0, usage(2)), (0, "[DONE]")])


def run(
    script: Script,
    path: Path,
    drawn: list[Prompt],
    finished: Finished | None = None,
    loads: tuple[Load, ...] = (Load(concurrency=1),),
    pass_index: int = 0,
    **given: int,
) -> list[Point]:
    options = BenchOptions.model_validate({"compare": ("a",), "output": path, **given})
    plan = Plan((), {"own": drawn}, None, loads)  # type: ignore[arg-type]
    done = {} if finished is None else finished
    with server(script) as url, RecordWriter(path) as writer:
        return measure(Endpoint(url, "m"), "a", plan, options, done, writer, Console(quiet=True), pass_index)


def asked(script: Script) -> list[str]:
    return [request["messages"][-1]["content"] for request in script.requests[WARM_UPS:]]


def test_prompts_are_sent_in_order_after_the_warm_up_which_is_not_recorded(tmp_path: Path) -> None:
    script = answer()
    run(script, tmp_path, prompts(3))
    assert asked(script) == ["question 0", "question 1", "question 2"]
    assert [record.prompt_id for record in read_records(tmp_path)] == ["0", "1", "2"]


def test_a_second_turn_carries_the_first_answer(tmp_path: Path) -> None:
    script = answer()
    run(script, tmp_path, prompts(1, turns=2))
    assert [message["content"] for message in script.requests[-1]["messages"]] == ["question 0", "yes.", "and 1?"]
    assert [record.turn for record in read_records(tmp_path)] == [0, 1]


def test_what_is_there_is_not_sent_again(tmp_path: Path) -> None:
    first = RequestRecord(variant="a", task="own", prompt_id="0", turn=0, text="earlier answer")
    script = answer()
    run(script, tmp_path, prompts(2, turns=2), finished_keys([first]))
    assert asked(script) == ["and 1?", "question 1", "and 1?"]
    assert script.requests[WARM_UPS]["messages"][1]["content"] == "earlier answer"


def test_every_repeat_sends_every_prompt(tmp_path: Path) -> None:
    script = answer()
    run(script, tmp_path, prompts(2), repeats=2)
    assert asked(script) == ["question 0", "question 1"] * 2
    assert {record.repeat for record in read_records(tmp_path)} == {0, 1}


def test_several_streams_send_every_prompt_once(tmp_path: Path) -> None:
    script = answer()
    run(script, tmp_path, prompts(10), loads=(Load(concurrency=4),))
    assert sorted(record.prompt_id for record in read_records(tmp_path)) == [str(i) for i in range(10)]
    assert len(script.requests) == 10 + 4


def test_failed_requests_are_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    script = answer()
    script.fail_from = WARM_UPS + 1
    run(script, tmp_path, prompts(3))
    assert [record.ok for record in read_records(tmp_path)] == [True, False, False]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_that_dies_ends_the_variant_in_a_sentence(tmp_path: Path, concurrency: int) -> None:
    script = answer()
    script.ill, script.fail_from = True, max(WARM_UPS, concurrency) + 1
    with pytest.raises(UserError, match="a: the server stopped answering during own"):
        run(script, tmp_path, prompts(5), loads=(Load(concurrency=concurrency),))
    records = read_records(tmp_path)
    assert any(record.error for record in records)
    assert len(records) < 5, "nothing more is sent to a dead server"


def test_a_warm_up_that_fails_ends_the_variant(tmp_path: Path) -> None:
    script = answer()
    script.fail_from = 0
    with pytest.raises(UserError, match="warm-up request failed"):
        run(script, tmp_path, prompts(1))


def test_missing_counts_turns_and_repeats() -> None:
    plan = Plan((), {"own": prompts(3, turns=2)}, None)  # type: ignore[arg-type]
    done = RequestKey("a", "own", "0", 1, 0)
    left = list(missing("a", plan, 2, {done: RequestRecord(**done._asdict())}))
    assert len(left) == 3 * 2 * 2 - 1
    assert done not in left


def test_every_load_point_is_warmed_up_and_sends_every_prompt(tmp_path: Path) -> None:
    script = answer()
    points = run(script, tmp_path, prompts(4), loads=(Load(concurrency=1), Load(concurrency=3), Load(rate=500.0)))
    assert [point.point for point in points] == ["c1", "c3", "r500"]
    records = read_records(tmp_path)
    for point in points:
        assert sorted(r.prompt_id for r in records if r.point == point.point) == ["0", "1", "2", "3"]
        assert point.num_requests == 4
    assert len(script.requests) == 3 * 4 + WARM_UPS + 3 + 4


def test_arrivals_do_not_wait_for_a_slow_server(tmp_path: Path) -> None:
    """All prompts are due within milliseconds; a closed loop would need ten answers' time."""
    slow = Script([(0.1, chunk("yes", [1])), (0, chunk(".", [2], "stop")), (0, usage(2)), (0, "[DONE]")])
    run(slow, tmp_path, prompts(10), loads=(Load(rate=400.0),), max_tokens=8)
    records = read_records(tmp_path)
    starts = sorted(record.started_s for record in records)
    assert starts[-1] - starts[0] < 10 * 0.1 / 2
    assert all(record.ttft_s is not None and record.ttft_s >= 0.1 + record.late_s for record in records)
    assert [round(start - starts[0], 4) for start in starts] == [round(t, 4) for t in arrival_times_s(400.0, 10, 0)]


def test_the_closing_pass_asks_for_half_of_the_prompts_again(tmp_path: Path) -> None:
    run(answer(), tmp_path, prompts(5))
    done = finished_keys(read_records(tmp_path))
    script = answer()
    (point,) = run(script, tmp_path, prompts(5), done, pass_index=1)
    assert asked(script) == ["question 0", "question 1", "question 2"]
    assert (point.pass_index, point.num_requests) == (1, 3)
    records = read_records(tmp_path)
    assert [record.pass_index for record in records] == [0] * 5 + [1] * 3


def test_a_prompt_that_does_not_fit_is_skipped_listed_and_not_tried_again(tmp_path: Path) -> None:
    script = answer()
    script.status, script.only, script.message = 400, "question 1", "maximum context length is 64 tokens"
    (point,) = run(script, tmp_path, prompts(3, turns=2))
    assert point.skipped == ("1",)
    records = read_records(tmp_path)
    assert [(r.prompt_id, r.turn) for r in records if r.skipped] == [("1", 0), ("1", 1)]
    again = answer()
    assert run(again, tmp_path, prompts(3, turns=2), finished_keys(records)) == []
    assert again.requests == []


def test_requests_and_counters_of_a_point_are_set_side_by_side(tmp_path: Path) -> None:
    steps = {"acceptance_histogram": [1, 0, 1], "num_draft_tokens": 4}
    told = usage(4, metrics={"speculative_decoding": steps})
    script = Script([(0, chunk("yes", [1, 2, 3])), (0, chunk(".", [4], "stop")), (0, told), (0, "[DONE]")])
    counted = (
        "vllm:spec_decode_num_drafts_total 4.0\nvllm:spec_decode_num_draft_tokens_total 8.0\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2.0\n'
    )

    class Counting(Script):
        @property
        def metrics(self) -> str:  # type: ignore[override]
            return (
                counted
                if len(self.requests) > WARM_UPS
                else counted.replace("4.0", "0").replace("8.0", "0").replace("2.0", "0")
            )

        @metrics.setter
        def metrics(self, _: str) -> None:
            pass

    (point,) = run(Counting(script.events), tmp_path, prompts(2))
    assert point.counters == point.requests == Acceptance(histogram=(2, 0, 2), drafted=8)
    assert point.agrees


def test_a_point_that_the_client_slowed_down_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.LagMeter.lag", lambda self: ClientLag(5.0, 6.0, 100))
    (point,) = run(answer(), tmp_path, prompts(2))
    assert point.refused is not None
    assert "the client was the bottleneck" in point.refused
    records = read_records(tmp_path)
    assert [record.error for record in records] == [point.refused] * 2
    assert finished_keys(records) == {}


def test_prefix_caches_are_emptied_and_salts_differ_between_points(tmp_path: Path) -> None:
    script = answer()
    points = run(
        script, tmp_path, prompts(1), loads=(Load(concurrency=1), Load(concurrency=2)), repeats=2, prefix_caching=True
    )
    assert script.resets == 4
    assert all(point.prefix_cache_reset for point in points)
    salts = [r["cache_salt"] for r in script.requests if r["messages"][-1]["content"] == "question 0"]
    assert len(set(salts)) == len(salts) == 4
    assert all(salt.isalnum() and len(salt) <= 128 for salt in salts), "vLLM refuses others"

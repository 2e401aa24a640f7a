"""One server's measurement: order, turns, continuation, failures and the server's death."""

from pathlib import Path

import pytest
from rich.console import Console
from scripted_server import Script, chunk, server, usage

from bench.measure import Finished, measure, missing
from bench.records import RecordWriter, RequestKey, RequestRecord, finished_keys, read_records
from bench.suite import BenchOptions, Plan
from bench.tasks import Prompt
from serve.endpoint import Endpoint
from speculators.errors import UserError

WARM_UPS = 2


def prompts(count: int, turns: int = 1) -> list[Prompt]:
    follow_ups = tuple(f"and {i}?" for i in range(1, turns))
    return [Prompt(str(i), ({"role": "user", "content": f"question {i}"},), follow_ups) for i in range(count)]


def answer() -> Script:
    return Script([(0, chunk("yes", [1])), (0, chunk(".", [2], "stop")), (0, usage(2)), (0, "[DONE]")])


def run(script: Script, path: Path, drawn: list[Prompt], finished: Finished | None = None, **given: int) -> None:
    options = BenchOptions.model_validate({"compare": ("a",), "output": path, **given})
    plan = Plan((), {"own": drawn}, None)  # type: ignore[arg-type]
    done = {} if finished is None else finished
    with server(script) as url, RecordWriter(path) as writer:
        measure(Endpoint(url, "m"), "a", plan, options, done, writer, Console(quiet=True))


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
    run(script, tmp_path, prompts(10), concurrency=4)
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
        run(script, tmp_path, prompts(5), concurrency=concurrency)
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

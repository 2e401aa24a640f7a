"""`regenerate` against a small HTTP server with OpenAI's chat endpoint: nothing is lost, nothing asked twice."""

import json
import re
from pathlib import Path

import pytest
from chat_server import ChatServer
from chatml_verifier import write_jsonl, write_verifier

from speculators.cli.options import resolve
from speculators.data.regenerate import plan, regenerate
from speculators.data.regenerate_options import RegenerateOptions
from speculators.errors import UserError
from speculators.verifier import Verifier


@pytest.fixture
def server():
    server = ChatServer()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return write_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture
def options(tmp_path, verifier):
    def options(rows, **given):
        prompts = write_jsonl(tmp_path / "prompts.jsonl", rows)
        return RegenerateOptions(verifier=str(verifier), prompts=prompts, output=tmp_path / "out.jsonl", **given)

    return options


def answers(options):
    return {row["id"]: row for row in map(json.loads, options.output.read_text().splitlines())}


def run(options, server):
    return regenerate(plan(options), options, server.url, "m")


def prompts(count):
    return [{"id": f"p{i}", "source": "math", "prompt": f"question {i}"} for i in range(count)]


def test_every_prompt_gets_its_own_answer_exactly_as_it_came(options, server):
    given = options(prompts(40), concurrency=8, max_tokens=99)
    summary = run(given, server)
    assert (summary.answered, summary.failed, summary.completion_tokens) == (40, 0, 120)
    rows = answers(given)
    for i in range(40):
        assert rows[f"p{i}"] == {
            "id": f"p{i}",
            "source": "math",
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": f" 1 question {i}\n"},
            ],
            "finish_reason": "stop",
            "completion_tokens": 3,
            "prompt_tokens": 5,
        }
    assert {(r["max_tokens"], r["temperature"], r["model"]) for r in server.requests} == {(99, 0, "m")}


def test_each_user_turn_is_answered_in_turn_and_foreign_answers_are_not_used(options, server):
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "somebody else's"},
        {"role": "user", "content": "b"},
    ]
    given = options([{"id": "x", "messages": turns}])
    run(given, server)
    row = answers(given)["x"]
    assert [m["content"] for m in row["messages"]] == ["s", "a", " 2 a\n", "b", " 4 b\n"]
    assert (row["completion_tokens"], row["prompt_tokens"]) == (6, 10)


def test_the_tokens_of_an_answer_are_kept_where_the_server_tells_them(options, server, verifier):
    server.token_ids = "tell"
    rows = [{"id": "a", "messages": [{"role": "user", "content": text} for text in ("one", "two")]}]
    given = options(rows)
    run(given, server)
    row = answers(given)["a"]
    texts = [message["content"] for message in row["messages"]]
    assert bytes(row["input_ids"]).decode() == "".join(texts)
    assert row["loss_mask"] == [int(i % 2) for i, text in enumerate(texts) for _ in text.encode()]
    assert row["made_with"] == Verifier.read(verifier).made_with


@pytest.mark.parametrize("token_ids", ["refuse", "ignore", "tell anew"])
def test_without_the_tokens_of_every_turn_the_text_alone_is_kept(options, server, token_ids):
    server.token_ids = token_ids
    rows = [{"id": "a", "messages": [{"role": "user", "content": text} for text in ("one", "two")]}]
    given = options(rows, concurrency=1)
    summary = run(given, server)
    assert (summary.answered, summary.failed) == (1, 0)
    assert not {"input_ids", "loss_mask", "made_with"} & set(answers(given)["a"])
    assert len(server.requests) == (3 if token_ids == "refuse" else 2), "a refusal is met once"


def test_an_answer_cut_at_its_limit_ends_the_conversation(options, server):
    turns = [{"from": "human", "value": text} for text in ("a", "long", "never asked")]
    given = options([{"id": "x", "conversations": turns}])
    run(given, server)
    row = answers(given)["x"]
    assert row["finish_reason"] == "length"
    assert [m["content"] for m in row["messages"]] == ["a", " 1 a\n", "long", " 3 long\n"]


def test_started_again_it_goes_on_after_a_half_written_line(options, server):
    run(options(prompts(10)), server)
    given = options(prompts(15))
    whole = given.output.read_bytes()
    given.output.write_bytes(whole[:-20])
    server.requests.clear()
    summary = run(given, server)
    assert (summary.answered, summary.answered_before, len(server.requests)) == (6, 9, 6)
    assert set(answers(given)) == {f"p{i}" for i in range(15)}
    assert len(given.output.read_text().splitlines()) == 15


def test_failures_are_listed_counted_and_tried_again(options, server):
    rows = [*prompts(3), {"id": "bad", "prompt": "refuse me"}, {"id": "cut", "prompt": "abort me"}]
    given = options(rows)
    summary = run(given, server)
    assert (summary.answered, summary.failed) == (3, 2)
    listed = {row["id"]: row["error"] for row in map(json.loads, Path(summary.failures).read_text().splitlines())}
    assert "too long" in listed["bad"]
    assert "'abort'" in listed["cut"]
    assert {p.conversation_id for p in plan(given).pending} == {"bad", "cut"}


def test_every_request_says_the_sampling_parameters_and_the_templates_arguments(options, server):
    sampling, template = {"top_p": 0.9, "top_k": 20}, {"enable_thinking": False}
    given = options(prompts(3), sampling_params=sampling, chat_template_kwargs=template, temperature=0.7)
    run(given, server)
    for request in server.requests:
        assert {name: request[name] for name in sampling} == sampling
        assert (request["chat_template_kwargs"], request["temperature"]) == (template, 0.7)
    assert {row["chat_template_kwargs"]["enable_thinking"] for row in answers(given).values()} == {False}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('{"temperature": 1}', "temperature is decided by --temperature"),
        ('{"n": 2}', "n is no sampling parameter of one answer"),
        ("top_p=1", "not a JSON object"),
    ],
)
def test_sampling_parameters_that_are_decided_elsewhere_are_refused(value, words):
    with pytest.raises(UserError, match=f"--sampling-params: {words}"):
        resolve(RegenerateOptions, {"verifier": "v", "prompts": "p", "output": "o", "sampling_params": value})


def test_reasoning_is_kept_and_told_to_the_server_in_the_next_turn(options, server):
    turns = [{"role": "user", "content": text} for text in ("think a", "b")]
    given = options([{"id": "x", "messages": turns}])
    run(given, server)
    said = answers(given)["x"]["messages"]
    assert [message.get("reasoning_content") for message in said] == [None, "hm", None, None]
    assert server.requests[1]["messages"][1] == said[1]


def test_tools_are_told_and_a_call_ends_the_conversation(options, server):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    turns = [{"role": "user", "content": text} for text in ("a", "call it", "never asked")]
    given = options([{"id": "x", "messages": turns, "tools": tools}])
    summary = run(given, server)
    row = answers(given)["x"]
    assert (summary.failed, row["finish_reason"], row["tools"]) == (0, "tool_calls", tools)
    assert row["messages"][-1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert [request["tools"] for request in server.requests] == [tools, tools]


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 7), ("temperature", 0.5), ("sampling_params", {"top_p": 0.5})]
)
def test_other_settings_do_not_continue_the_same_file(options, server, name, value):
    run(options(prompts(2)), server)
    with pytest.raises(UserError, match=rf"made with {name} = .*, this run has {re.escape(str(value))}"):
        plan(options(prompts(2), **{name: value}))


def test_answers_of_unknown_origin_are_not_continued(options):
    given = options(prompts(2))
    given.output.write_text('{"id": "p0"}\n')
    with pytest.raises(UserError, match="the settings that the answers"):
        plan(given)


def test_a_server_that_goes_away_ends_the_run_and_keeps_the_answers(options, server):
    given = options(prompts(3))
    run(given, server)
    dead = server.url
    server.http.shutdown()
    server.http.server_close()
    given = options(prompts(5))
    with pytest.raises(UserError, match=r"does not answer .* start the same command to continue"):
        regenerate(plan(given), given, dead, "m")
    assert len(answers(given)) == 3


def test_no_usable_prompt_says_what_was_found(options):
    with pytest.raises(UserError, match=r"no usable prompt among 1 rows.*keys seen: text"):
        plan(options([{"text": "x"}]))


def test_a_server_that_refuses_everything_is_an_error(options, server):
    with pytest.raises(UserError, match=r"refused all 2 prompts, the last one with: .*too long"):
        run(options([{"prompt": "refuse me"}, {"prompt": "refuse this"}]), server)


def test_one_id_for_two_prompts_is_refused(options):
    with pytest.raises(UserError, match="'7' belongs to two different prompts"):
        plan(options([{"id": 7, "prompt": "a"}, {"id": 7, "prompt": "b"}]))


def test_a_verifier_without_chat_template_is_refused_before_anything_starts(options, tmp_path):
    given = options(prompts(2)).model_copy(update={"verifier": str(write_verifier(tmp_path / "v", None))})
    with pytest.raises(UserError, match="no chat template"):
        plan(given)


def test_equal_prompts_are_asked_once(options, server):
    given = options([{"prompt": "same"}, {"prompt": "same"}])
    assert run(given, server).answered == 1

"""Every accepted row shape reads as the same conversation; every refused one says why."""

import json
import re

import numpy as np
import pytest
from chatml_verifier import chat, write_jsonl

from speculators.data.conversations import Conversation, Dropped, ReadyTokens, parse_row, to_messages
from speculators.data.row_files import count_rows, read_rows
from speculators.errors import UserError

SHAPES = [
    {"messages": chat("hello", "hi")},
    {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
    {"conversations": chat("hello", "hi")},
    {"prompt": "hello", "response": "hi"},
    {"prompt": [{"role": "user", "content": "hello"}], "response": "hi"},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": "hi"},
        ]
    },
    {"messages": [*chat("hello", "hi"), {"role": "user", "content": "never answered"}]},
]


@pytest.mark.parametrize("row", SHAPES)
def test_all_shapes_read_as_the_same_conversation(row):
    parsed = parse_row(row)
    assert isinstance(parsed, Conversation)
    assert parsed.messages == chat("hello", "hi")
    assert parsed.conversation_id == parse_row(SHAPES[0]).conversation_id


def test_the_rows_own_id_source_and_finish_reason_are_kept():
    parsed = parse_row({**SHAPES[0], "id": 7, "source": "math", "finish_reason": "length"})
    assert (parsed.conversation_id, parsed.source, parsed.finish_reason) == ("7", "math", "length")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x", "label": 1}, r"known shapes \(keys seen: label, text\)"),
        ({}, "keys seen: none"),
        ({"messages": []}, "keys seen"),
        ({"messages": "hello"}, "not a list"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        ({"messages": [{"role": "user", "content": None}]}, "without text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no answer"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "begins with an answer"),
        ({"prompt": "x"}, "without a `response`"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "differ in length"),
        ({"input_ids": ["a"], "loss_mask": [1]}, "not a list of integers"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(row, reason):
    parsed = parse_row(row)
    assert isinstance(parsed, Dropped)
    assert re.search(reason, parsed.reason)


def test_ready_tokens_are_taken_as_they_are():
    parsed = parse_row({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "messages": chat("a", "b")})
    assert isinstance(parsed, ReadyTokens)
    assert parsed.ids.tolist() == [5, 6, 7]
    assert parsed.loss_mask.tolist() == [False, True, True]
    assert (parsed.ids.dtype, parsed.loss_mask.dtype) == (np.int32, np.bool_)


def test_half_a_surrogate_pair_does_not_reach_the_tokenizer():
    for row in ({"prompt": "a\ud83d", "response": "b\ud83d"}, {"messages": chat("a\ud83d", "b\ud83d")}):
        assert parse_row(row).messages == chat("a?", "b?")


def test_a_prompt_alone_is_enough_to_be_answered():
    assert to_messages({"prompt": "hello"}, with_response=False) == [{"role": "user", "content": "hello"}]


def test_jsonl_json_and_parquet_hold_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"id": "a", "messages": chat("with \u2028 inside", "hi\n")}, {"id": "b", "messages": chat("x", "y")}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    write_jsonl(tmp_path / "lines.json", rows)
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "lines.json", "list.json", "a.parquet"):
        assert list(read_rows(tmp_path / name)) == rows, name
        assert count_rows(tmp_path / name) == 2, name


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"a": 1}\n{"a":', "line 2 is not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1 holds a JSON list"),
        ("a.json", "[1]", "row 1 is a JSON int"),
        ("a.json", "[", "not valid JSON"),
        ("a.parquet", "no", "not a readable parquet"),
        ("a.csv", "a,b", "'.csv' are not known"),
    ],
)
def test_an_unreadable_file_is_named_with_its_line(tmp_path, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=sentence) as error:
        list(read_rows(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        list(read_rows(tmp_path / "absent.jsonl"))


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_need_no_text_and_their_arguments_are_objects(as_text):
    calls, tools = (json.dumps(value) if as_text else value for value in ([CALL], TOOLS))
    messages = [
        {"role": "user", "content": "one and one?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    parsed = parse_row({"messages": messages, "tools": tools})
    assert parsed.tools == TOOLS
    assert [message["role"] for message in parsed.messages] == ["user", "assistant", "tool", "assistant"]
    assert parsed.messages[1]["content"] == ""
    assert parsed.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


def test_reasoning_by_its_newer_name_is_what_templates_read():
    row = {"messages": [chat("a", "b")[0], {"role": "assistant", "content": "b", "reasoning": "hm"}]}
    assert parse_row(row).messages[1]["reasoning_content"] == "hm"


def test_tokens_made_with_other_template_arguments_give_way_to_the_text():
    row = {
        "input_ids": [5, 6], "loss_mask": [0, 1], "made_with": "v", "chat_template_kwargs": {"thinking": False},
        "messages": chat("a", "b"),
    }  # fmt: skip
    assert isinstance(parse_row(row, "v"), ReadyTokens)
    assert isinstance(parse_row(row, "v", {"thinking": False}), ReadyTokens)
    assert parse_row(row, "v", {"thinking": True}).template_kwargs == {"thinking": True}
    assert parse_row(row, "another").template_kwargs == {"thinking": False}
    foreign = {name: value for name, value in row.items() if name != "made_with"}
    assert isinstance(parse_row(foreign, "v", {"thinking": True}), ReadyTokens), "nobody says what they were made with"


def test_ready_tokens_of_another_verifier_give_way_to_the_text():
    row = {"input_ids": [5, 6], "loss_mask": [0, 1], "made_with": "old/template", "messages": chat("a", "b")}
    assert isinstance(parse_row(row, "old/template"), ReadyTokens)
    assert parse_row(row, "new/template").messages == chat("a", "b")
    reason = parse_row({**row, "messages": None}, "new/template").reason
    assert "another verifier or chat template" in reason
    unnamed = {name: value for name, value in row.items() if name != "made_with"}
    assert isinstance(parse_row(unnamed, "new/template"), ReadyTokens)

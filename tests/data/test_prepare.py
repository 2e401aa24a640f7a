"""`prepare` as a whole: what is kept, cut, dropped and split, on a tiny verifier."""

import json

import numpy as np
import pytest
from chatml_verifier import (
    CHANGES_PROMPT,
    FORGETS_THINKING,
    NO_SYSTEM,
    TOOLS_AND_REASONING,
    chat,
    write_jsonl,
    write_verifier,
)

from speculators.cli.options import resolve
from speculators.data.prepare import PrepareOptions, prepare, split_by_conversation
from speculators.data.samples import DataDirectory, sample_id
from speculators.errors import UserError
from speculators.verifier import Verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return write_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture
def run(tmp_path, verifier):
    """Prepare rows and open what was written."""

    def run(rows, verifier=verifier, **options):
        data = write_jsonl(tmp_path / "rows.jsonl", rows)
        given = {
            "verifier": str(verifier),
            "data": (data,),
            "output": tmp_path / "out",
            "draft_vocab_size": 50,
            **options,
        }
        summary = prepare(PrepareOptions(**given))
        directory = DataDirectory(tmp_path / "out")
        return summary, directory, [sample for name in ("train", "validation") for sample in directory.split(name)]

    return run


def rows_of(count):
    return [
        {"id": f"c{i}", "source": "chat", "messages": chat(f"hello {i}", f"the answer is {i}")} for i in range(count)
    ]


def test_what_is_written_is_what_is_read(run, verifier):
    summary, directory, samples = run(rows_of(20), validation_share=0.3)
    tokenizer = Verifier.read(verifier).tokenizer
    assert summary.rows == 20
    assert {s.conversation_id: tokenizer.decode(s.ids[s.loss_mask]) for s in samples} == {
        f"c{i}": f"the answer is {i}<|im_end|>" for i in range(20)
    }
    assert all(s.sample_id == sample_id(s.ids) and s.source == "chat" for s in samples)
    directory.check_made_for(Verifier.read(verifier))
    assert directory.manifest.splits == summary.splits
    assert sum(stats.samples for stats in summary.splits.values()) == 20


def test_token_counts_are_the_supervised_tokens_of_the_training_split(run):
    _, directory, _ = run(rows_of(20), validation_share=0.3)
    expected = np.zeros(directory.manifest.vocab_size, np.int64)
    for sample in directory.split("train"):
        for token, supervised in zip(sample.ids, sample.loss_mask, strict=True):
            expected[token] += supervised
    np.testing.assert_array_equal(directory.token_counts, expected)


def test_the_same_rows_in_another_order_give_the_same_directory(run, tmp_path):
    run(rows_of(20))
    before = {p.name: p.read_bytes() for p in (tmp_path / "out" / "train").iterdir()}
    run(rows_of(20)[::-1])
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "out" / "train").iterdir()}


def test_a_conversation_stays_on_its_side_when_the_data_grows():
    small = split_by_conversation([f"c{i}" for i in range(200)], 0.1)
    large = split_by_conversation([f"c{i}" for i in range(2000)], 0.1)
    assert small == {name for name in large if int(name[1:]) < 200}
    assert 120 < len(large) < 280


@pytest.mark.parametrize("share", [1e-9, 0.999])
def test_neither_side_is_empty_with_two_conversations(share):
    assert len(split_by_conversation(["a", "b"], share)) == 1
    assert split_by_conversation(["a"], share) == frozenset()
    assert split_by_conversation(["a", "b"], 0) == frozenset()


def test_rows_of_one_conversation_are_never_on_both_sides(run):
    rows = [{"messages": chat(f"question {i % 10}", f"answer {i}")} for i in range(60)]
    _, directory, _ = run(rows, validation_share=0.4)
    sides = [{s.conversation_id for s in directory.split(name)} for name in ("train", "validation")]
    assert all(sides)
    assert not sides[0] & sides[1]


def test_long_rows_are_cut_and_those_left_without_an_answer_are_dropped_and_counted(run):
    rows = [*rows_of(3), {"messages": chat("hello", "the answer " * 30)}, {"messages": chat("hello " * 60, "x")}]
    summary, _, samples = run(rows, max_length=32)
    assert max(len(s.ids) for s in samples) == 32
    assert summary.cut_to_max_length == 2
    assert summary.dropped == {"no supervised token (within --max-length)": 1}
    assert len(samples) == 4


def test_duplicates_are_dropped_and_counted(run):
    summary, _, samples = run([*rows_of(4), *rows_of(4)])
    assert len(samples) == 4
    assert summary.dropped == {"duplicate of another row": 4}


def test_ready_tokens_pass_through_and_foreign_ids_are_dropped(run):
    rows = [
        {"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"id": "b", "input_ids": [1, 2, 10**6], "loss_mask": [0, 1, 1]},
        {"id": "c", "input_ids": [-1, 2, 3], "loss_mask": [0, 1, 1]},
        {"id": "d", "input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 0]},
        {"id": "e", "input_ids": [], "loss_mask": []},
    ]
    summary, _, samples = run(rows)
    assert [(s.ids.tolist(), s.loss_mask.tolist()) for s in samples] == [([1, 2, 3], [False, True, True])]
    assert summary.dropped["a token id outside the verifier's vocabulary"] == 2
    assert summary.dropped["no supervised token (within --max-length)"] == 2


def test_a_length_limited_answer_does_not_teach_an_end(run, verifier):
    _, _, samples = run([{"messages": chat("hello", "the answer"), "finish_reason": "length"}])
    end = Verifier.read(verifier).tokenizer.eos_token_id
    assert samples[0].ids[-1] != end


def test_coverage_covers_the_asked_size_and_its_neighbours(run):
    summary, _, _ = run(rows_of(20))
    assert {12, 25, 50, 100, 200} == set(summary.coverage)
    assert list(summary.coverage.values()) == sorted(summary.coverage.values())
    assert summary.coverage[200] == 1


def test_a_template_that_forgets_thinking_gives_one_sample_an_answer(run, tmp_path):
    verifier = write_verifier(tmp_path / "v", FORGETS_THINKING)
    messages = [*chat("hello", "hm</think>42"), *chat("sure?", "hm</think>yes")]
    summary, _, samples = run([{"id": "a", "messages": messages}, {"id": "b", "messages": chat("x", "y")}], verifier)
    tokenizer = Verifier.read(verifier).tokenizer
    assert summary.split_into_turns == 1
    assert sorted(tokenizer.decode(s.ids[s.loss_mask]) for s in samples) == [
        "hm</think>42<|im_end|>",
        "hm</think>yes<|im_end|>",
        "y<|im_end|>",
    ]
    assert len({s.conversation_id for s in samples}) == 2


def test_a_conversation_with_system_prompt_tools_and_several_answers_is_one_row(run, tmp_path):
    verifier = write_verifier(tmp_path / "v", TOOLS_AND_REASONING)
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one and one?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
        *chat("sure?", "yes"),
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    summary, _, (sample,) = run([{"messages": messages, "tools": tools}], verifier)
    tokenizer = Verifier.read(verifier).tokenizer
    whole, written = (tokenizer.decode(ids) for ids in (sample.ids, sample.ids[sample.loss_mask]))
    calls = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
    assert written == f"{calls}<|im_end|>two<|im_end|>yes<|im_end|>"
    assert "be brief" in whole
    assert json.dumps(tools) in whole
    assert (summary.split_into_turns, summary.without_reasoning) == (0, 0)


def reasoned(*answers):
    turns = [({"role": "user", "content": f"q{i}"}, {"role": "assistant", **said}) for i, said in enumerate(answers)]
    return {"messages": [message for turn in turns for message in turn]}


def test_reasoning_is_learned_where_the_template_shows_it_and_counted_where_not(run, tmp_path, verifier):
    tokenizer = Verifier.read(verifier).tokenizer
    row = reasoned({"content": "42", "reasoning_content": "hm"}, {"content": "yes", "reasoning_content": "so"})
    summary, _, samples = run([row], write_verifier(tmp_path / "v", TOOLS_AND_REASONING))
    assert sorted(tokenizer.decode(s.ids[s.loss_mask]) for s in samples) == [
        "<think>hm</think>42<|im_end|>",
        "<think>so</think>yes<|im_end|>",
    ]
    assert (summary.split_into_turns, summary.without_reasoning) == (1, 0)
    summary, _, samples = run([row, *rows_of(2)], verifier)
    assert (len(samples), summary.without_reasoning) == (3, 1)


def test_arguments_of_the_template_reach_it_and_the_manifest(run, tmp_path):
    verifier = write_verifier(tmp_path / "v", TOOLS_AND_REASONING)
    tokenizer = Verifier.read(verifier).tokenizer
    prompts = {}
    for kwargs in (None, {"enable_thinking": False}):
        # With the argument given, the template puts the same words in front of a prompt's answer that it leaves out
        # of an answered one, so the answer itself has to bring them.
        said = "hi" if kwargs is None else "<think></think>hi"
        _, directory, (sample,) = run([{"messages": chat("hello", said)}], verifier, chat_template_kwargs=kwargs)
        prompts[str(kwargs)] = tokenizer.decode(sample.ids[~sample.loss_mask])
        assert directory.manifest.chat_template_kwargs == kwargs
        assert tokenizer.decode(sample.ids[sample.loss_mask]) == "hi<|im_end|>"
    assert prompts["{'enable_thinking': False}"].endswith("<think></think>")
    assert not prompts["None"].endswith("<think></think>")


@pytest.mark.parametrize("value", ["{", "[1]", "3"])
def test_template_arguments_that_are_no_object_are_refused(value):
    given = {"verifier": "v", "data": "d", "output": "o", "chat_template_kwargs": value}
    with pytest.raises(UserError, match="--chat-template-kwargs: not a JSON object"):
        resolve(PrepareOptions, given)


def test_any_number_of_processes_writes_the_same_directory(run, tmp_path):
    rows = [*rows_of(80), {"text": "x"}, {"messages": chat("hello", "the answer " * 30)}, *rows_of(1)]
    made = []
    for workers in (1, 2):
        summary, _, _ = run(rows, max_length=32, workers=workers)
        files = {p.name: p.read_bytes() for p in (tmp_path / "out" / "train").iterdir()}
        made.append((summary, files))
    assert made[0] == made[1]
    assert made[0][0].dropped == {"none of the known shapes (keys seen: text)": 1, "duplicate of another row": 1}


def test_a_template_that_refuses_a_row_drops_that_row_with_its_reason(run, tmp_path):
    verifier = write_verifier(tmp_path / "v", NO_SYSTEM)
    bad = {"messages": [{"role": "system", "content": "s"}, *chat("hello", "hi")]}
    summary, _, samples = run([bad, *rows_of(2)], verifier)
    assert len(samples) == 2
    assert summary.dropped == {"refused by the chat template (system is not supported)": 1}


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        (
            [{"text": "x"}],
            {},
            r"no usable conversation.*`messages`.*`input_ids` with `loss_mask`.*1 x .*keys seen: text",
        ),
        ([], {}, "no usable conversation.*no rows at all"),
        (rows_of(2), {"draft_vocab_size": 10**6}, "--draft-vocab-size: 1000000 "),
        (rows_of(2), {"verifier": "/nowhere"}, "--verifier: /nowhere is not a directory"),
    ],
)
def test_bad_input_is_one_sentence(run, rows, options, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        run(rows, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("template", "sentence"), [(CHANGES_PROMPT, "changes the prompt"), (None, "no chat template")])
def test_a_template_that_cannot_be_followed_is_refused(run, tmp_path, template, sentence):
    with pytest.raises(UserError, match=sentence):
        run(rows_of(2), write_verifier(tmp_path / "v", template))


def test_a_directory_that_is_not_ours_is_never_replaced(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is not a data directory"):
        run(rows_of(2))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_a_failing_run_leaves_the_older_directory_and_nothing_else(run, tmp_path):
    run(rows_of(5))
    before = json.loads((tmp_path / "out" / "manifest.json").read_text())
    with pytest.raises(UserError):
        run([])
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "rows.jsonl"]

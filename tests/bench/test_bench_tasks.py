"""Which prompts a name means, and that every run draws the same ones in the same order."""

import json
from pathlib import Path

import pytest

from bench.tasks import TASKS, closest_first, draw, prompts_hash, select
from speculators.errors import UserError


def test_a_group_is_its_tasks_and_each_comes_once() -> None:
    assert [task.name for task in select(["reasoning", "humaneval", "code"])] == [
        "gsm8k",
        "math500",
        "humaneval",
        "mbpp",
    ]


def test_an_unknown_task_lists_the_known_ones_the_closest_first() -> None:
    with pytest.raises(UserError, match=r"unknown task 'gsm8'; known are gsm8k, .*mbpp.*JSONL"):
        select(["gsm8"])


def test_the_closest_come_first_and_none_is_lost() -> None:
    known = ["reasoning", "code", "chat", "humaneval"]
    assert closest_first("human_eval", known)[0] == "humaneval"
    assert sorted(closest_first("human_eval", known)) == sorted(known)


def test_prompts_depend_on_the_seed_alone() -> None:
    task = TASKS["builtin_code"]
    assert draw(task, 5, 1) == draw(task, 5, 1)
    assert draw(task, 5, 1) != draw(task, 5, 2)
    assert draw(task, 3, 1) == draw(task, 5, 1)[:3]
    assert len(draw(task, 1000, 1)) == len(task.load())
    assert prompts_hash(draw(task, 5, 1)) != prompts_hash(draw(task, 4, 1))


def test_own_prompts_are_read_in_every_shape(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one\u2028line", "extra": 1},
        {"turns": ["first", "second"]},
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    ]
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    (task,) = select([str(path)])
    prompts = task.load()
    assert task.name == "traffic"
    assert [p.messages[-1]["content"] for p in prompts] == ["one\u2028line", "first", "q", "q"]
    assert [p.num_turns for p in prompts] == [1, 2, 1, 1]
    assert prompts[2].messages[0]["role"] == "system"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"question": "x"}', "line 1 has question"),
        ('{"prompt": "ok"}\n{"prompt": ""}', "line 2"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1"),
        ("[1]", "line 1 has no keys"),
        ("{broken", "cannot be read as JSONL"),
        ("\n", "is empty"),
    ],
)
def test_unusable_own_prompts_are_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(content)
    (task,) = select([str(path)])
    with pytest.raises(UserError, match=said):
        task.load()


def test_a_missing_file_and_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        select([str(tmp_path / "nothing.jsonl")])
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match="two files are called 'own'"):
        select([str(tmp_path / "a/own.jsonl"), str(tmp_path / "b/own.jsonl")])


def test_a_directory_is_a_task_for_each_of_its_files(tmp_path: Path) -> None:
    """The layout of RedHatAI/speculator_benchmarks (field `prompt`) and of SPEED-Bench (field `turns`)."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "qa.jsonl").write_text('{"prompt": "why?"}\n{"prompt": "how?"}\n')
    (tmp_path / "deep/multi.jsonl").write_text('{"question_id": "x", "category": "c", "turns": ["first", "second"]}\n')
    tasks = select([str(tmp_path)])
    assert [task.name for task in tasks] == ["deep/multi", "qa"]
    assert [[p.num_turns for p in task.load()] for task in tasks] == [[2], [1, 1]]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no \.jsonl file"):
        select([str(tmp_path / "empty")])


def test_a_hub_id_needs_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    (task,) = select(["someone/collection:qa"])
    assert task.name == "qa"
    with pytest.raises(UserError, match="someone/collection is on the hub, and the package datasets is not installed"):
        task.load()


def test_every_builtin_task_has_twenty_different_prompts() -> None:
    tasks = [task for task in TASKS.values() if task.group == "builtin"]
    assert [task.name.removeprefix("builtin_") for task in tasks] == [
        "reasoning",
        "code",
        "chat",
        "qa",
        "rag",
        "summarization",
    ]
    for task in tasks:
        prompts = task.load()
        assert len({prompt.messages[-1]["content"] for prompt in prompts}) == len(prompts) == 20
        assert {prompt.num_turns for prompt in prompts} == ({2} if task.name == "builtin_chat" else {1})


def test_groups_cover_what_is_asked_of_a_draft() -> None:
    assert {"reasoning", "code", "chat", "qa", "rag", "summarization", "builtin"} == {t.group for t in TASKS.values()}

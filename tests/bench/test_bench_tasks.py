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
    with pytest.raises(UserError, match=r"holds no \.jsonl or \.parquet file"):
        select([str(tmp_path / "empty")])


MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def test_the_parquet_files_of_speed_bench_are_read_and_its_masked_prompts_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "qualitative"
    path.mkdir()
    for shard, turns in enumerate([[["first", "second"], [MASKED]], [["third"]]]):
        table = pyarrow.table({"question_id": [str(i) for i in range(len(turns))], "turns": turns})
        pyarrow.parquet.write_table(table, path / f"test-0000{shard}-of-00002.parquet")
    (task,) = select([str(tmp_path)])
    assert task.name == "qualitative/test"
    assert [(p.prompt_id, p.messages[0]["content"], p.num_turns) for p in task.load()] == [
        ("0", "first", 2),
        ("2", "third", 1),
    ]
    assert "1 of 3 prompts are masked" in capsys.readouterr().err
    (tmp_path / "masked.jsonl").write_text(json.dumps({"turns": ["real", MASKED]}) + "\n")
    (task,) = select([str(tmp_path / "masked.jsonl")])
    with pytest.raises(UserError, match="only masked prompts"):
        task.load()
    (tmp_path / "broken.parquet").write_text("no parquet")
    (task,) = select([str(tmp_path / "broken.parquet")])
    with pytest.raises(UserError, match="cannot be read as parquet"):
        task.load()


class FakeDatasets:
    """The part of the package `datasets` that is used, with two data sets."""

    def get_dataset_config_names(self, name: str) -> list[str]:
        return {"nvidia/SPEED-Bench": ["qualitative"]}.get(name, ["default"])

    def load_dataset(self, name: str, /, **chosen: str) -> dict[str, list[dict[str, object]]]:
        if name == "math-ai/aime25" and not chosen:
            return {"test": [{"problem": "Find m+n.", "answer": "70"}]}
        if (name, chosen) == ("nvidia/SPEED-Bench", {"name": "qualitative"}):
            return {"test": [{"question_id": "a", "turns": ["one", "two"]}]}
        if (name, chosen) == ("RedHatAI/speculator_benchmarks", {"data_files": "**/qa.jsonl"}):
            return {"train": [{"prompt": "why?"}]}
        raise OSError(f"no data set {name}")


def test_a_data_set_of_the_hub_is_read_by_configuration_or_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets())  # type: ignore[arg-type]
    names = ["aime25", "nvidia/SPEED-Bench:qualitative", "RedHatAI/speculator_benchmarks:qa", "someone/else"]
    tasks = select(names)
    assert [task.name for task in tasks] == ["aime25", "qualitative", "qa", "else"]
    assert [[p.messages[0]["content"] for p in task.load()] for task in tasks[:3]] == [["Find m+n."], ["one"], ["why?"]]
    assert tasks[1].load()[0].follow_ups == ("two",)
    with pytest.raises(UserError, match=r"someone/else cannot be loaded \(no data set"):
        tasks[3].load()


def test_aime25_is_known_and_no_part_of_its_group() -> None:
    assert TASKS["aime25"].group == "reasoning"
    assert "aime25" not in [task.name for task in select(["reasoning"])]
    with pytest.raises(UserError, match=r"unknown task 'aime'; known are aime25"):
        select(["aime"])


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

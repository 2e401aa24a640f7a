"""Predicted and served acceptance: the answers that are walked, the same prompts on both sides, sums by a slow loop."""

import json
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from rich.console import Console
from test_bench_report import TASKS, make_run, row
from test_bench_variants import options, verifier, write_run  # noqa: F401  (verifier is a fixture)

from bench.answers import ANSWERS_FILE, read_predictions, write_answers
from bench.charts import parity_chart
from bench.parity import parity
from bench.records import BenchRun, RecordWriter, RequestRecord, Variant
from bench.render import to_html, to_markdown, write_report
from bench.report import Report, build
from bench.run import run_bench
from bench.suite import make_plan
from bench.tables import signed
from speculators.acceptance import Acceptance
from speculators.data.conversations import ReadyTokens, parse_row
from speculators.data.row_files import read_rows
from speculators.errors import UserError
from speculators.prediction import Prediction, SamplePrediction
from speculators.schema import write_json

NAMES = [f"{task}/{prompt}" for task in TASKS for prompt in range(8)]


def prediction(names: list[str], histogram: tuple[int, ...] = (4, 3, 2, 1)) -> Prediction:
    samples = [
        SamplePrediction(
            sample_id=f"{number:016x}",
            conversation_id=name,
            source=name.split("/")[0],
            acceptance=Acceptance.from_histogram((histogram[0] + number % 5, *histogram[1:])),
        )
        for number, name in enumerate(names)
    ]
    return Prediction.of("/runs/dflash", samples, len(histogram) - 1)


def with_prediction(path: Path, name: str = "dflash", made: Prediction | None = None) -> Path:
    write_json(path / "predicted" / f"{name}.json", made or prediction(NAMES))
    return path


def served(prompt: int, histogram: tuple[int, ...], task: str = "gsm8k", **more: object) -> RequestRecord:
    return row("dflash", task, prompt, 0.01, acceptance=Acceptance.from_histogram(histogram), **more)


def test_answers_are_the_exact_tokens_that_the_plain_server_was_sent_and_wrote(tmp_path: Path) -> None:
    run = BenchRun.read(make_run(tmp_path, num_prompts=1))
    with RecordWriter(tmp_path) as writer:
        for changed in (
            {"prompt": 0, "prompt_token_ids": (7, 8), "token_ids": (1, 2, 3)},
            {"prompt": 1, "prompt_token_ids": (9,), "token_ids": (5,)},
            {"prompt": 2, "prompt_token_ids": (9,), "token_ids": (5,), "turn": 1},
            {"prompt": 3, "prompt_token_ids": (9,), "token_ids": (5,), "repeat": 1},
            {"prompt": 4, "prompt_token_ids": (9,), "token_ids": (5,), "error": "dropped"},
            {"prompt": 5, "prompt_token_ids": None, "token_ids": (5,)},
            {"prompt": 6, "prompt_token_ids": (9,), "token_ids": None},
        ):
            writer.append(row("baseline", "gsm8k", tpot_s=0.01, **changed))  # type: ignore[arg-type]
        writer.append(row("dflash", "gsm8k", 7, 0.01, prompt_token_ids=(9,), token_ids=(5,)))
    assert write_answers(tmp_path, run) == 2
    parsed = [parse_row(one) for one in read_rows(tmp_path / ANSWERS_FILE)]
    assert all(isinstance(one, ReadyTokens) for one in parsed)
    told = [(p.conversation_id, p.source, p.ids.tolist(), p.loss_mask.tolist()) for p in parsed]  # type: ignore[union-attr]
    assert told == [
        ("gsm8k/0", "gsm8k", [7, 8, 1, 2, 3], [False, False, True, True, True]),
        ("gsm8k/1", "gsm8k", [9, 5], [False, True]),
    ]


def test_sampled_or_unknown_tokens_are_no_answers(tmp_path: Path) -> None:
    run = BenchRun.read(make_run(tmp_path))
    assert write_answers(tmp_path, run) == 0, "these records have no prompt tokens"
    with RecordWriter(tmp_path) as writer:
        writer.append(row("baseline", "gsm8k", 0, 0.01, prompt_token_ids=(7,)))
    sampled = run.conditions.model_copy(update={"temperature": 0.7})
    assert write_answers(tmp_path, run.model_copy(update={"conditions": sampled})) == 0
    assert not (tmp_path / ANSWERS_FILE).exists()


def test_every_bench_run_ends_with_its_answers(tmp_path: Path, verifier: Path) -> None:  # noqa: F811
    """Everything is measured already, so no server is started."""
    write_run(tmp_path / "out" / "dflash", verifier)
    plan = make_plan(options(tmp_path))
    with RecordWriter(tmp_path / "bench") as writer:
        for variant in ("baseline", "dflash"):
            for prompt in plan.prompts["builtin_code"]:
                fields = {"variant": variant, "task": "builtin_code", "prompt_id": prompt.prompt_id, "tpot_s": 0.01}
                fields |= {"token_ids": (1, 2), "prompt_token_ids": (3,)}
                writer.append(RequestRecord.model_validate(fields))
    run_bench(options(tmp_path, closing_baseline=False), Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "bench" / ANSWERS_FILE).read_text().splitlines()]
    assert [one["id"] for one in rows] == [f"builtin_code/{p.prompt_id}" for p in plan.prompts["builtin_code"]]


def test_sums_are_over_the_same_prompts_on_both_sides() -> None:
    rng = np.random.default_rng(1)
    records = [
        served(prompt, tuple(int(n) for n in rng.multinomial(20, [0.4, 0.3, 0.2, 0.1])), task, repeat=repeat)
        for task in TASKS
        for prompt in range(6)
        for repeat in range(2)
    ]
    records += [
        served(9, (50, 0, 0, 0)),
        served(0, (90, 0, 0, 0), turn=1),
        served(1, (70, 0, 0, 0), repeat=2, error="x"),
    ]
    names = [f"{task}/{prompt}" for task in TASKS for prompt in range(3, 8)]
    made = prediction(names)
    found = parity(made, records, TASKS)
    assert found is not None
    assert [(r.task, r.num_prompts, r.num_served) for r in found.tasks] == [
        ("gsm8k", 3, 7),
        ("humaneval", 3, 6),
        ("all tasks", 6, 13),
    ]
    for line in found.tasks:
        steps, tokens = [0, 0], [0, 0]
        for task in TASKS:
            for prompt in range(3, 6):
                if line.task not in (task, "all tasks"):
                    continue
                walked = [s.acceptance for s in made.samples if s.conversation_id == f"{task}/{prompt}"]
                told = [r.acceptance for r in records if (r.task, r.prompt_id) == (task, str(prompt)) and r.acceptance]
                for side, parts in enumerate((walked, told)):
                    steps[side] += sum(part.steps for part in parts)
                    tokens[side] += sum(part.steps + part.accepted for part in parts)
        expected = [tokens[side] / steps[side] for side in (0, 1)]
        assert [line.predicted, line.served] == pytest.approx(expected)
        assert line.relative_difference == pytest.approx(expected[0] / expected[1] - 1)
    assert len(found.prompts) == 6


def test_equal_counts_agree_exactly() -> None:
    made = prediction(NAMES)
    records = [served(int(s.conversation_id[-1]), s.acceptance.histogram, s.source) for s in made.samples]
    found = parity(made, records, TASKS)
    assert found is not None
    assert [line.relative_difference for line in found.tasks] == [0.0, 0.0, 0.0]
    assert all(prompt.predicted == prompt.served for prompt in found.prompts)


def test_prompts_without_a_step_are_not_compared() -> None:
    records = [served(0, (0, 0, 0, 0)), served(1, (2, 1, 0, 0))]
    found = parity(prediction(["gsm8k/0", "gsm8k/1"]), records, TASKS)
    assert found is not None
    assert [prompt.prompt_id for prompt in found.prompts] == ["1"]
    assert parity(prediction(["gsm8k/0"]), records, TASKS) is None
    assert parity(prediction(["mbpp/1"]), records, TASKS) is None
    assert parity(prediction(NAMES), [], TASKS) is None


def test_without_a_prediction_nothing_is_shown(tmp_path: Path) -> None:
    report = build(make_run(tmp_path))
    assert report.parity == ()
    assert parity_chart(report) is None
    assert "redicted" not in to_markdown(report)
    assert 'id="parity"' not in to_html(report)


def test_a_prediction_is_shown_in_every_rendering(tmp_path: Path) -> None:
    report = build(with_prediction(make_run(tmp_path)))
    (found,) = report.parity
    total = found.tasks[-1]
    assert (found.variant, total.task, total.num_prompts) == ("dflash", "all tasks", 16)
    write_report(report, tmp_path)
    assert Report.model_validate_json((tmp_path / "report.json").read_text()).parity == report.parity
    cells = f"{total.predicted:.2f} | {total.served:.2f} | {signed(total.relative_difference)} | 16"
    assert f"| all tasks | dflash | {cells} |" in (tmp_path / "report.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert 'id="parity"' in page
    for text in (page, (tmp_path / "report.md").read_text()):
        assert "the served text leaves the text that the prediction walked" in text
    chart = parity_chart(report)
    assert chart is not None
    go.Figure(chart)
    assert len(chart["data"][0]["x"]) == 16
    diagonal = chart["layout"]["shapes"][0]
    assert (
        (diagonal["x0"], diagonal["x1"]) == (diagonal["y0"], diagonal["y1"]) == tuple(chart["layout"]["xaxis"]["range"])
    )


def test_what_cannot_be_compared_is_said_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name, made, said in (
        ("dflash", prediction(NAMES, (4, 3, 2, 1, 1)), "it is for K = 4, and K = 3 was served"),
        ("dflash", prediction(["gsm8k/99"]), "no prompt in common"),
        ("eagle3", prediction(NAMES), "predicted/eagle3.json is left out: no variant of this run"),
    ):
        report = build(with_prediction(run, name, made))
        assert report.parity == ()
        assert said in " ".join(report.notes)
    conditions = BenchRun.read(run).conditions.model_copy(update={"temperature": 0.7})
    report = build(with_prediction(make_run(tmp_path / "sampled", conditions=conditions)))
    assert report.parity == ()
    assert "temperature 0.7 was served" in " ".join(report.notes)


def test_a_file_that_is_no_prediction_is_named(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_json(tmp_path / "predicted" / "dflash.json", {"surprise": 1})
    with pytest.raises(UserError, match=r"predicted/dflash\.json: draft: Field required"):
        build(tmp_path)


def test_a_variant_that_is_a_path_finds_its_file(tmp_path: Path) -> None:
    variant = Variant(name="output/dflash/checkpoints/step-1", verifier="v")
    with_prediction(tmp_path, variant.file_name)
    predictions, strangers = read_predictions(tmp_path, [variant])
    assert list(predictions) == [variant.name]
    assert strangers == []

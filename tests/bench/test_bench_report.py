"""The report is a function of the run directory, says what is wrong with it, and its page is whole and safe."""

import csv
import io
import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from bench.charts import FEW_STEPS, position_charts, speed_up_chart
from bench.records import (
    BenchRun,
    Conditions,
    Outcome,
    Point,
    RecordWriter,
    RequestRecord,
    TaskInfo,
    Variant,
)
from bench.render import to_csv, to_html, to_markdown, write_report
from bench.report import SCHEMA_VERSION, Report, build
from bench.tables import signed
from speculators.acceptance import Acceptance
from speculators.errors import UserError
from speculators.provenance import Provenance

ROOT = Path(__file__).parents[2]
TASKS = ("gsm8k", "humaneval")
NASTY = "</script><script>alert(1)</script>|"


def make_run(path: Path, num_prompts: int = 8, speed_up: float = 1.5, **changes: object) -> Path:
    """A baseline, a draft and an FP8 variant that was skipped."""
    conditions = Conditions(
        verifier="/models/smol",
        verifier_revision="abc",
        template_hash="def",
        prompts=dict.fromkeys(TASKS, "0"),
        max_tokens=64,
        temperature=0.0,
        seed=0,
        concurrency=1,
        repeats=1,
        enforce_eager=False,
        server_args=(),
        vllm="0.32.0",
        machine="a processor, 2 cores, 16 GiB",
    )
    variants = (
        Variant(name="baseline", verifier="/models/smol"),
        Variant(
            name="dflash", verifier="/models/smol", draft="/runs/dflash", draft_revision="1", num_speculative_tokens=3
        ),
        Variant(name="fp8", verifier="/models/smol-fp8", fp8=True),
    )
    run = BenchRun(
        conditions=conditions,
        tasks=tuple(TaskInfo(name=task, group="g", num_prompts=num_prompts) for task in TASKS),
        variants=variants,
        outcomes={
            "baseline": Outcome(status="measured"),
            "dflash": Outcome(status="measured"),
            "fp8": Outcome(status="skipped", reason=f"this processor has no AMX {NASTY}"),
        },
        provenance=Provenance.collect(),
    )
    run.model_copy(update=changes).write(path)
    rng = np.random.default_rng(0)
    with RecordWriter(path) as writer:
        for task in TASKS:
            for prompt in range(num_prompts):
                slow = 0.03 * rng.lognormal(0, 0.05)
                writer.append(row("baseline", task, prompt, slow))
                histogram = tuple(int(n) for n in rng.multinomial(30, [0.4, 0.3, 0.2, 0.1]))
                fast = slow / speed_up * rng.lognormal(0, 0.05)
                writer.append(row("dflash", task, prompt, fast, acceptance=Acceptance.from_histogram(histogram)))
    return path


def row(variant: str, task: str, prompt: int, tpot_s: float, **more: object) -> RequestRecord:
    fields = {"variant": variant, "task": task, "prompt_id": str(prompt), "tpot_s": tpot_s, "ttft_s": 0.05}
    fields |= {"e2e_s": 0.05 + 63 * tpot_s, "output_tokens": 64, "token_ids": (1, 2, 3), "chunk_gaps_s": (tpot_s,)}
    return RequestRecord.model_validate({**fields, **more})


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return build(make_run(tmp_path))


def test_the_same_directory_gives_the_same_report(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert build(tmp_path) == build(tmp_path)


@pytest.mark.parametrize(
    ("speed_up", "said"),
    [(1.5, "Yes, it pays: dflash"), (0.7, "No, it does not pay"), (1.0, "Not settled|no difference")],
)
def test_the_first_sentence_is_the_verdict(tmp_path: Path, speed_up: float, said: str) -> None:
    assert re.match(said, build(make_run(tmp_path, speed_up=speed_up)).headline)


def test_few_prompts_give_numbers_without_a_verdict(tmp_path: Path) -> None:
    report = build(make_run(tmp_path, num_prompts=2))
    assert report.headline.startswith("Not settled")
    assert "4 prompts are too few for an interval" in report.detail
    assert "no interval" not in to_markdown(report)


def test_every_measured_cell_is_there_and_adds_up(report: Report) -> None:
    assert report.measured == ("baseline", "dflash")
    overall = report.cell("all tasks", "dflash")
    parts = [report.cell(task, "dflash") for task in TASKS]
    assert overall is not None
    assert overall.metrics.num_requests == sum(part.metrics.num_requests for part in parts if part)
    assert overall.acceptance_length is not None
    assert sum(rate or 0 for rate in overall.marginal) == pytest.approx(overall.acceptance_length.estimate - 1)


def test_skipped_unfinished_and_mismatched_are_said_everywhere(tmp_path: Path) -> None:
    told, counted = Acceptance.from_histogram([5, 1]), Acceptance.from_histogram([6, 1])
    point = Point(variant="dflash", task="gsm8k", num_requests=8, num_failed=1, requests=told, counters=counted)
    skipped = Outcome(status="skipped", reason="no AMX here")
    report = build(make_run(tmp_path, outcomes={"fp8": skipped}, points=(point,)))
    for text in (to_markdown(report), to_html(report)):
        assert "fp8 was skipped: no AMX here" in text
        assert "dflash was not finished" in text
        assert "1 of 6 drafted tokens accepted in 6 steps against 1 of 7 drafted tokens accepted in 7 steps" in text


def test_other_work_on_the_machine_puts_latencies_in_doubt(tmp_path: Path) -> None:
    fields = {"task": "gsm8k", "num_requests": 8, "num_failed": 0, "requests": None, "counters": None}
    busy = Point.model_validate({**fields, "variant": "baseline", "other_cores": 1.7})
    quiet = Point.model_validate({**fields, "variant": "dflash", "other_cores": 0.1})
    report = build(make_run(tmp_path, points=(busy, quiet)))
    doubts = [note for note in report.notes if "in doubt" in note]
    assert "in doubt" in report.detail
    assert len(doubts) == 1
    assert "used 0.1 cores while it was measured and 1.7 during the baseline" in doubts[0]
    same = busy.model_copy(update={"variant": "dflash"})
    assert not [note for note in build(make_run(tmp_path / "b", points=(busy, same))).notes if "in doubt" in note]


def test_equal_counts_with_and_without_an_unused_position_agree() -> None:
    fields = {"variant": "a", "task": "b", "num_requests": 1, "num_failed": 0}
    requests, counters = Acceptance(histogram=(3, 1, 0), drafted=8), Acceptance(histogram=(3, 1), drafted=8)
    assert Point.model_validate({**fields, "requests": requests, "counters": counters}).agrees is True
    assert Point.model_validate({**fields, "requests": None, "counters": counters}).agrees is None


def test_failed_requests_are_counted_apart(tmp_path: Path) -> None:
    make_run(tmp_path)
    with RecordWriter(tmp_path) as writer:
        writer.append(row("dflash", "gsm8k", 3, 99.0, error="Error code: 500"))
    report = build(tmp_path)
    assert report.failures == {"dflash, gsm8k: Error code: 500": 1}
    cell = report.cell("gsm8k", "dflash")
    assert cell is not None
    assert (cell.metrics.num_requests, cell.metrics.num_failed) == (8, 1)
    assert cell.speed_up is not None
    assert cell.speed_up.num_prompts == 7


def test_a_run_without_a_success_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path, num_prompts=0)
    with pytest.raises(UserError, match="no request of this run succeeded"):
        build(tmp_path)
    with pytest.raises(UserError, match="speculators bench"):
        build(tmp_path / "nothing")


def test_the_page_loads_nothing_and_escapes_everything(report: Report) -> None:
    page = to_html(report)
    own = page.replace(re.findall(r"<script>.*?</script>", page, flags=re.DOTALL)[0], "")
    assert not re.search(r"(src|href)=|@import|url\(", own)
    assert NASTY not in own
    assert "&lt;script&gt;alert" in own


def test_the_charts_are_valid_plotly(report: Report) -> None:
    import plotly.graph_objects as go

    chart = speed_up_chart(report)
    assert chart is not None
    positions = position_charts(report)
    assert list(positions) == ["marginal", "conditional"]
    assert list(positions["marginal"]) == ["all tasks", "humaneval", "gsm8k"]
    for figure in (chart, *positions["marginal"].values(), *positions["conditional"].values()):
        go.Figure(figure)
        json.dumps(figure, allow_nan=False)
    assert len(chart["data"]) == 1


def test_all_files_are_written_and_hold_the_same_numbers(tmp_path: Path) -> None:
    report = build(make_run(tmp_path))
    html = write_report(report, tmp_path)
    assert html == tmp_path / "report.html"
    assert Report.model_validate_json((tmp_path / "report.json").read_text()) == report
    rows = list(csv.DictReader(io.StringIO((tmp_path / "report.csv").read_text())))
    assert len(rows) == len(report.cells)
    for line, cell in zip(rows, report.cells, strict=True):
        assert (line["task"], line["variant"]) == (cell.task, cell.variant)
        if cell.speed_up:
            assert float(line["speed_up"]) == cell.speed_up.estimate
    assert to_csv(report) == (tmp_path / "report.csv").read_text()


def test_rendering_again_gives_the_same_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = {path: path.read_bytes() for path in run.iterdir()}
    files = []
    for name in ("once", "again"):
        write_report(build(run), tmp_path / name)
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert files[0].keys() == {"report.html", "report.md", "report.csv", "report.json"}
    assert files[0] == files[1]
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_a_written_report_has_a_version_and_keeps_to_the_schema_in_the_documentation(tmp_path: Path) -> None:
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / "report.json").read_text())
    write_report(build(make_run(tmp_path)), tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(written)
    assert written["schema_version"] == SCHEMA_VERSION
    wrong = {**written, "cells": [{**written["cells"][0], "task": 3}]}
    assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)


def test_conditional_rates_of_few_steps_are_not_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path, num_prompts=1)
    report = build(run)
    cell = report.cell("gsm8k", "dflash")
    assert cell is not None
    assert cell.metrics.acceptance is not None
    counts = cell.metrics.acceptance.histogram
    reached = [sum(counts[position:]) for position in range(len(counts) - 1)]
    drawn = position_charts(report)["conditional"]["gsm8k"]["data"][0]["x"]
    assert drawn == [position for position, steps in enumerate(reached, start=1) if steps >= FEW_STEPS]
    assert len(drawn) < len(reached)


def test_differences_have_a_true_minus_and_zero_has_no_sign() -> None:
    assert [signed(share) for share in (0.028, -0.009, -0.0004, 0.0)] == ["+2.8%", "−0.9%", "0.0%", "0.0%"]


def test_one_task_has_no_row_over_all(tmp_path: Path) -> None:
    tasks = (TaskInfo(name="gsm8k", group="reasoning", num_prompts=8),)
    report = build(make_run(tmp_path, tasks=tasks))
    assert report.rows == ("gsm8k",)
    assert "all tasks |" not in to_markdown(report)

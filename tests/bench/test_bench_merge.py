"""Several loads and runs in one report: pairs, drift, noise floor, unequal conditions, another tool's results, gate."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from test_bench_report import TASKS, make_run, row

from bench.audit import audit_sentence, losslessness
from bench.buckets import by_context_length, by_output_position
from bench.gate import GateOptions, check, parse, share
from bench.packed import read_packed
from bench.records import BenchRun, RecordWriter, RequestRecord, Variant, read_records
from bench.render import to_csv, to_html, to_markdown
from bench.report import build
from speculators.acceptance import Acceptance
from speculators.errors import UserError


def make_loaded_run(path: Path, closing: float = 1.0) -> Path:
    """`make_run` with a second draft, a second load and the baseline's closing pass, `closing` times as slow."""
    run = BenchRun.read(make_run(path, num_prompts=12))
    other = Variant(name="eagle3", verifier="/models/smol", draft="/e", algorithm="eagle3", num_speculative_tokens=3)
    conditions = run.conditions.model_copy(update={"points": ("c1", "c4")})
    run.model_copy(update={"variants": (*run.variants, other), "conditions": conditions}).write(path)
    rng = np.random.default_rng(1)
    with RecordWriter(path) as writer:
        for task in TASKS:
            for prompt in range(12):
                slow = 0.03 * rng.lognormal(0, 0.02)
                steps = Acceptance.from_histogram(tuple(int(n) for n in rng.multinomial(30, [0.7, 0.2, 0.1, 0.0])))
                writer.append(row("eagle3", task, prompt, slow / 1.2, acceptance=steps))
                writer.append(row("baseline", task, prompt, slow * 2, point="c4", started_s=prompt))
                writer.append(row("eagle3", task, prompt, slow * 3.2, point="c4", acceptance=steps, started_s=prompt))
    opening = {(r.task, r.prompt_id): r for r in read_records(path) if r.variant == "baseline" and r.point == "c1"}
    with RecordWriter(path) as writer:
        for record in opening.values():
            slower = (record.tpot_s or 0) * closing
            writer.append(record.model_copy(update={"pass_index": 1, "tpot_s": slower}))
    return path


def test_every_load_has_its_own_cells_and_the_two_drafts_are_compared(tmp_path: Path) -> None:
    report = build(make_loaded_run(tmp_path))
    assert report.load_points == ("c1", "c4")
    first, second = report.cell("all tasks", "eagle3"), report.cell("all tasks", "eagle3", "c4")
    assert first is not None and first.speed_up is not None and first.speed_up.verdict == "better"  # noqa: PT018
    assert second is not None and second.speed_up is not None and second.speed_up.verdict == "worse"  # noqa: PT018
    pairs = {(c.metric, c.task): c for c in report.comparisons if c.point == "c1"}
    assert pairs["acceptance_length", "all tasks"].verdict == "better"
    assert (pairs["speed_up", "all tasks"].variant, pairs["speed_up", "all tasks"].reference) == ("dflash", "eagle3")
    settings = {(d.variant, d.point): d for d in report.decision if d.task == "all tasks"}
    assert settings["eagle3", "c1"].best_k > 0
    assert settings["eagle3", "c4"].best_k == 0
    for text in (to_markdown(report), to_html(report)):
        assert "concurrency 4" in text
        assert "Do not speculate here" in text


@pytest.mark.parametrize(("closing", "marked"), [(1.02, False), (1.2, True)])
def test_drift_marks_latency_verdicts_and_no_others(tmp_path: Path, closing: float, marked: bool) -> None:
    report = build(make_loaded_run(tmp_path, closing))
    assert [d.ratio for d in report.drift] == [pytest.approx(closing)]
    latencies = [c for c in report.comparisons if c.metric == "speed_up" and c.point == "c1"]
    assert {c.doubtful for c in latencies} == {marked}
    assert not any(c.doubtful for c in report.comparisons if c.metric == "acceptance_length" or c.point == "c4")
    assert any("Drift" in note for note in report.notes) is marked


def test_packed_rows_say_the_same_and_name_a_broken_line(tmp_path: Path) -> None:
    make_loaded_run(tmp_path)
    whole, packed = read_records(tmp_path), read_packed(tmp_path)
    assert [r.key for r in packed] == [r.key for r in whole]
    for a, b in zip(packed, whole, strict=True):
        assert (a.tpot_s, a.acceptance, tuple(a.token_ids or ()), tuple(a.chunk_gaps_s)) == (
            b.tpot_s,
            b.acceptance,
            b.token_ids,
            b.chunk_gaps_s,
        )
    with (tmp_path / "requests.jsonl").open("a") as file:
        file.write("{broken\n{}\n")
    with pytest.raises(UserError, match="line"):
        read_packed(tmp_path)


def audited(equal: int, floor_equal: int, floor: bool = True) -> str:
    def outputs(good: int, **more: object) -> list[RequestRecord]:
        ids = [(1, 2, 3) if i < good else (1, 9, 3) for i in range(40)]
        return [row("baseline", "t", i, 0.01, token_ids=one, **more) for i, one in enumerate(ids)]

    base, again = outputs(40), outputs(floor_equal, pass_index=1) if floor else []
    mine = [r.model_copy(update={"variant": "a"}) for r in outputs(equal)]
    found = losslessness(mine, base, again)
    assert found is not None
    assert str(found.equal) in audit_sentence(found)
    return found.verdict


def test_the_audit_holds_a_variant_against_the_servers_own_noise() -> None:
    assert audited(40, 40) == "identical"
    assert audited(37, 38) == "within noise"
    assert audited(20, 38) == "differs"
    assert audited(39, 40, floor=False) == "unknown"


def test_buckets_count_every_step_once_where_it_began() -> None:
    records = [row("a", "t", i, 0.01, accepted_per_step=(3,) * 10 + (0,) * 5, prompt_tokens=50) for i in range(2)]
    found = by_output_position(records)
    assert sum(b.steps for b in found) == 30
    expected: dict[int, list[int]] = {}
    position = 1
    for accepted in (3,) * 10 + (0,) * 5:
        expected.setdefault(next(e for e in (64, 32, 16, 0) if position >= e), []).append(accepted)
        position += accepted + 1
    assert {b.low: b.acceptance_length for b in found} == {
        low: pytest.approx(1 + np.mean(steps)) for low, steps in expected.items()
    }
    assert [b.low for b in by_context_length(records)] == [0, 64]
    assert by_output_position([row("a", "t", 0, 0.01)]) == ()


def test_runs_merge_and_each_keeps_its_own_baseline(tmp_path: Path) -> None:
    report = build(make_run(tmp_path / "a"), make_run(tmp_path / "b", speed_up=1.2))
    assert report.measured == ("baseline", "dflash", "baseline (run 2)", "dflash (run 2)")
    second = report.cell("all tasks", "dflash (run 2)")
    assert second is not None
    assert second.speed_up is not None
    assert second.speed_up.reference == "baseline (run 2)"
    assert second.speed_up.estimate == pytest.approx(1.2, rel=0.05)


def test_unequal_conditions_are_refused_and_forced_only_with_a_word_everywhere(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    run = BenchRun.read(b)
    run.model_copy(update={"conditions": run.conditions.model_copy(update={"max_tokens": 99})}).write(b)
    with pytest.raises(UserError, match=r"max_tokens is 64 .* and 99 .*--force"):
        build(a, b)
    report = build(a, b, force=True)
    for text in (to_markdown(report), to_html(report), to_csv(report), report.model_dump_json(), report.detail):
        assert "UNEQUAL" in text or "max_tokens is 64" in text


def vllm_result(path: Path, gap: float) -> str:
    data = {"model_id": "m", "num_prompts": 6, "request_rate": "inf", "max_concurrency": 2, "duration": 3.0}
    data |= {"input_lens": [5] * 6, "output_lens": [5] * 6, "ttfts": [0.1] * 6, "errors": [""] * 5 + ["boom"]}
    data |= {"itls": [[gap, gap]] * 6, "start_times": [float(i) for i in range(6)], "generated_texts": ["x"] * 6}
    data |= {"spec_decode_num_drafts": 10, "spec_decode_draft_tokens": 20}
    data |= {"spec_decode_per_position_acceptance_rates": [0.5, 0.2]}
    path.write_text(json.dumps(data))
    return str(path)


def test_results_of_vllm_bench_serve_stand_in_the_same_table(tmp_path: Path) -> None:
    base, fast = vllm_result(tmp_path / "a.json", 0.04), vllm_result(tmp_path / "b.json", 0.02)
    report = build(f"baseline={base}", f"draft={fast}")
    cell = report.cell("imported", "draft")
    assert report.load_points == ("c2",)
    assert cell is not None
    assert cell.metrics.tpot_s is not None
    assert cell.metrics.tpot_s.p50 == pytest.approx(2 * 0.02 / 4)
    assert cell.metrics.num_failed == 1
    assert cell.speed_up is not None
    assert cell.speed_up.estimate == pytest.approx(2)
    assert cell.acceptance_length is not None
    assert cell.acceptance_length.estimate == pytest.approx(1.7)
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(UserError, match="save-detailed"):
        build(str(tmp_path / "c.json"))


def gate(path: Path, *require: str, **more: object) -> tuple[bool, str, ET.Element]:
    found = check(GateOptions.model_validate({"run": path, "require": require, **more}))
    return found.passed, (path / "gate.md").read_text(), ET.fromstring((path / "gate.xml").read_text())


def test_the_gate_fails_on_a_missed_requirement_and_says_which(tmp_path: Path) -> None:
    passed, summary, suite = gate(make_run(tmp_path), "acceptance_length:g>=1.5", "speed_up:gsm8k:dflash>=9")
    assert not passed
    assert "Gate failed: 1 of 3" in summary
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert len(suite.findall("testcase/failure")) == 1


def test_the_gate_fails_on_a_significant_regression_only(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "a"), make_run(tmp_path / "b", speed_up=1.2)
    assert gate(make_run(tmp_path / "c"), baseline=good)[0]
    passed, summary, _ = gate(bad, baseline=good)
    assert not passed
    assert "no worse speed (dflash, all tasks" in summary
    assert gate(bad, baseline=good, no_worse_than="30%")[0]


@pytest.mark.parametrize("text", ["acceptance_length", "speed>=1", "speed_up>=fast"])
def test_a_requirement_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--require"):
        parse(text)


def test_shares_are_read_with_and_without_percent(tmp_path: Path) -> None:
    assert share("3%") == share("0.03") == pytest.approx(0.03)
    with pytest.raises(UserError, match="--no-worse-than"):
        share("300%")
    with pytest.raises(UserError, match="nothing to check"):
        check(GateOptions(run=tmp_path))
    with pytest.raises(UserError, match="matches nothing"):
        gate(make_run(tmp_path), "speed_up:poetry>=1")

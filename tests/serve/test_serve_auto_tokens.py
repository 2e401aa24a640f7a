"""K by a bench report: the least time a token, by a slow loop over every K; and the reason is always told."""

import pytest
from fake_vllm import environment
from tiny_models import write_models, write_random_draft

from bench.compare import ALL_TASKS
from bench.metrics import PointMetrics
from bench.records import Variant
from bench.summary import Cell
from serve import auto_tokens
from serve.auto_tokens import choose
from serve.options import ServeOptions, spec_of
from speculators import checkpoint
from speculators.acceptance import Acceptance
from speculators.errors import UserError
from speculators.schema import write_json
from speculators.verifier import weights_revision


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("auto")
    write_models(root, "eagle3", "dflash")
    environment(root / "vllm")
    return root


def write_report(path, place, algorithm, measured, plain_s=None, revision=None):
    """`measured`: K -> (histogram, seconds a step)."""
    draft = place / algorithm
    variants = [{"name": "baseline", "verifier": str(place / "verifier"), "fp8": False}]
    cells = [{"task": "all tasks", "variant": "baseline", "metrics": {"tpot_s": {"mean": plain_s}}, "x": 1}]
    for tokens, (histogram, step_s) in measured.items():
        acceptance = Acceptance.from_histogram(histogram)
        name = f"{algorithm}@{tokens}"
        revised = revision or weights_revision(draft)
        variants.append({**variants[0], "name": name, "draft": str(draft), "draft_revision": revised})
        variants[-1]["num_speculative_tokens"] = tokens
        metrics = {"acceptance": acceptance.model_dump(), "tpot_s": {"mean": step_s / acceptance.length, "p50": 1}}
        cells.append({"task": "all tasks", "variant": name, "metrics": metrics})
        cells.append({"task": "gsm8k", "variant": name, "metrics": {}})
    if plain_s is None:
        variants, cells = variants[1:], cells[1:]
    write_json(path / "report.json", {"headline": "x", "variants": variants, "cells": cells})
    return path / "report.json"


def chosen(place, algorithm, report=None):
    config = checkpoint.read_config(place / algorithm)
    return choose(place / algorithm, config, str(place / "verifier"), report)


@pytest.mark.parametrize("histogram", [(60, 25, 10, 4, 1), (5, 5, 10, 20, 60), (98, 1, 1, 0, 0), (0, 0, 0, 0, 9)])
@pytest.mark.parametrize("cost_s", [0.0001, 0.002, 0.03])
def test_a_chain_gets_the_k_with_the_least_time_a_token(place, tmp_path, histogram, cost_s):
    report = write_report(tmp_path, place, "eagle3", {4: (histogram, 0.02 + 4 * cost_s)}, plain_s=0.02)
    acceptance = Acceptance.from_histogram(histogram)
    times = {k: (0.02 + k * cost_s) / acceptance.truncated(k).length for k in (1, 2, 3, 4)}
    choice = chosen(place, "eagle3", report)
    assert times[choice.num_speculative_tokens] == pytest.approx(min(times.values()))
    assert f"{min(times.values()) * 1000:.1f} ms a token" in choice.reason


def test_two_measured_k_tell_the_step_cost_without_a_plain_verifier(place, tmp_path):
    measured = {2: ((20, 20, 60), 0.05 + 2 * 0.001), 4: ((20, 20, 20, 20, 20), 0.05 + 4 * 0.001)}
    report = write_report(tmp_path, place, "eagle3", measured)
    assert chosen(place, "eagle3", report).num_speculative_tokens == 4
    one = write_report(tmp_path / "one", place, "eagle3", {2: ((20, 20, 60), 0.05)})
    assert chosen(place, "eagle3", one) == (2, f"the only K measured in {one}")


def test_a_block_draft_gets_a_measured_k_only(place, tmp_path):
    measured = {3: ((40, 30, 20, 10), 0.021), 7: ((40, 30, 20, 10, 0, 0, 0, 0), 0.03)}
    report = write_report(tmp_path, place, "dflash", measured, plain_s=0.02)
    choice = chosen(place, "dflash", report)
    assert choice.num_speculative_tokens == 3
    assert "fastest of K = 7 and 3" in choice.reason


def test_without_a_fitting_report_it_is_as_trained_and_says_why(place, tmp_path):
    assert chosen(place, "dflash") == (7, f"as trained: no bench report beside {place / 'dflash'}")
    stale = write_report(tmp_path, place, "dflash", {3: ((1, 1, 1, 1), 0.02)}, revision="0" * 16)
    with pytest.raises(UserError, match=r"--report: .* no measurement of .* with .*verifier"):
        chosen(place, "dflash", stale)
    with pytest.raises(UserError, match=r"--report: .* does not exist"):
        chosen(place, "dflash", tmp_path / "nowhere.json")


def test_a_report_beside_the_run_is_found_and_the_reason_is_shown(place, tmp_path):
    run = tmp_path / "output" / "dflash"
    write_random_draft(run / "checkpoints" / "step-5", "dflash", place / "verifier")
    draft = run / "checkpoints" / "step-5"
    write_report(tmp_path / "output" / "bench", place, "dflash", {4: ((1, 1, 1, 1, 1), 0.02)}, 0.02)
    assert weights_revision(draft) == weights_revision(place / "dflash")
    spec = spec_of(ServeOptions(model=str(run), num_speculative_tokens="auto", vllm=str(place / "vllm")))
    assert spec.num_speculative_tokens == 4
    assert spec.notes[-1].startswith("--num-speculative-tokens auto: 4 (the only K measured")


@pytest.mark.parametrize("given", ["many", "1.5", ""])
def test_what_is_no_number_and_not_auto_is_refused(place, given):
    with pytest.raises(ValueError, match="must be a whole number or auto"):
        ServeOptions(model="m", num_speculative_tokens=given)
    assert ServeOptions(model="m", num_speculative_tokens="-3").num_speculative_tokens == -3


def test_what_is_read_here_is_what_a_bench_writes():
    assert auto_tokens.ALL_TASKS == ALL_TASKS
    for mine, theirs in (
        (auto_tokens._Variant, Variant),
        (auto_tokens._Metrics, PointMetrics),
    ):
        assert set(mine.model_fields) <= set(theirs.model_fields)
    assert set(auto_tokens._Cell.model_fields) - {"point"} <= set(Cell.model_fields)

"""The doctor: quiet about a healthy run, and each check finds its own illness."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from doctored import ROWS, chat, fill_cache, flags, make_world, options, rewrite_data
from tiny import tiny_draft, tiny_row, tiny_verifier

from speculators import cli
from speculators.algorithms.base import Batch
from speculators.data.samples import DataDirectory, TokenizedSample
from speculators.doctor import CHECKS, Finding, check_before_training, diagnose, gather
from speculators.doctor_states import on_policy_counts
from speculators.doctor_text import anchor_coverage
from speculators.errors import UserError
from speculators.schema import read_json_dict, write_json

THINKS = "{% set enable_thinking = true %}"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("healthy"))


@pytest.fixture
def world(healthy: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(healthy, tmp_path / "world"))


def findings(root: Path, algorithm: str = "dflash", **changes: object) -> dict[str, Finding]:
    return {f.check: f for f in diagnose(gather(options(root, algorithm, **changes))).findings}


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_healthy_run_has_nothing_but_ok(healthy: Path, algorithm: str) -> None:
    found = findings(healthy, algorithm)
    assert {f.level for f in found.values()} == {"ok"}, found
    blocks_only = 0 if algorithm == "dflash" else 2
    assert len(found) == len(CHECKS) - blocks_only
    assert all(f.sentence.endswith(".") for f in found.values())


@pytest.mark.parametrize(
    ("check", "level", "words", "changes"),
    [
        ("anchors", "warning", "1 anchors for about", {"max_anchors": 1}),
        ("vocabulary", "warning", "--draft-vocab-size 16 would cover", {"draft_vocab_size": 8}),
        ("mask-token", "error", "occurs at least", {"mask_token_id": 1}),
        ("memory", "error", "so it cannot fit", {"row_length": 10**12}),
        ("manifest", "error", "the run asks for [2, 3]", {"aux_layer_ids": (2, 3)}),
        ("manifest", "error", "not a hidden-state cache", {"hidden_states": Path("/nowhere")}),
    ],
)
def test_options_that_do_not_fit_are_found(
    healthy: Path, check: str, level: str, words: str, changes: dict[str, object]
) -> None:
    finding = findings(healthy, **changes)[check]
    assert finding.level == level
    assert words in finding.sentence


def supervise_all(sample: TokenizedSample) -> TokenizedSample:
    return sample._replace(loss_mask=np.ones_like(sample.loss_mask))


def supervise_none(sample: TokenizedSample) -> TokenizedSample:
    return sample._replace(loss_mask=np.zeros_like(sample.loss_mask))


def test_a_loss_mask_of_all_ones_or_all_zeros_is_found(world: Path) -> None:
    rewrite_data(world, supervise_all)
    assert findings(world)["loss-mask"].level == "warning"
    rewrite_data(world, supervise_none)
    assert findings(world)["loss-mask"].level == "error"
    with pytest.raises(UserError, match="nothing would be learned"):
        check_before_training(gather(options(world)))


def test_text_of_another_writer_is_found_by_its_share_of_first_choices(world: Path) -> None:
    agreed, seen = on_policy_counts(gather(options(world)))
    assert agreed == seen > 50
    fill_cache(world, lambda following: torch.randn(len(following), 16).bfloat16())
    finding = findings(world)["on-policy"]
    assert finding.level == "warning"
    assert "speculators regenerate" in finding.sentence


def test_states_that_are_blank_or_missing_are_found_with_their_file(world: Path) -> None:
    fill_cache(world, lambda following: torch.zeros(len(following), 16).bfloat16())
    finding = findings(world)["cached-states"]
    assert (finding.level, "last_hidden is all zeros" in finding.sentence) == ("error", True)
    for file in (world / "h").glob("*/*.safetensors"):
        file.unlink()
    finding = findings(world)["cached-states"]
    assert finding.level == "error"
    assert f"{world / 'h'} lacks 8 of 8 sampled samples" in finding.sentence


def test_a_conversation_on_both_sides_of_the_split_is_found(world: Path) -> None:
    held_out = DataDirectory(world / "d").split("validation")[0]
    rewrite_data(world, lambda sample: sample._replace(conversation_id=held_out.conversation_id))
    assert "of the validation samples share" in findings(world)["duplicates"].sentence
    rewrite_data(world, lambda sample: sample._replace(conversation_id="x", ids=held_out.ids[: len(sample.ids)]))
    assert findings(world)["duplicates"].level == "warning"


def test_data_and_cache_of_another_verifier_are_found(world: Path) -> None:
    config = read_json_dict(world / "v" / "config.json", "a config")
    write_json(world / "v" / "config.json", {**config, "rms_norm_eps": 1e-6})
    finding = findings(world)["manifest"]
    assert finding.level == "error"
    assert "another verifier" in finding.sentence


def test_prompts_that_the_template_would_not_render_are_found(tmp_path: Path) -> None:
    rows = [{"id": i, "input_ids": [5 + i, 7, 8, 9, 10], "loss_mask": [0, 0, 1, 1, 1]} for i in range(20)]
    finding = findings(make_world(tmp_path, rows=rows))["template"]
    assert finding.level == "warning"
    assert "assistant" in finding.sentence


def test_thinking_in_the_data_and_in_the_template_must_go_together(tmp_path: Path, healthy: Path) -> None:
    template = (Path(healthy) / "v" / "chat_template.jinja").read_text()
    thoughts = [{**row, "messages": chat("hello", f"<think>hm {i}</think> yes")} for i, row in enumerate(ROWS)]
    empty = [{**row, "messages": chat(f"hello {i}", "<think>\n\n</think> yes")} for i, row in enumerate(ROWS)]
    levels = {}
    for name, made_with, rows in (
        ("knows, thinks", THINKS + template, thoughts),
        ("knows, never", THINKS + template, ROWS),
        ("knows, empty", THINKS + template, empty),
        ("unknown, thinks", template, thoughts),
    ):
        place = tmp_path / name
        place.mkdir()
        levels[name] = findings(make_world(place, made_with, rows))["thinking"].level
    assert levels == {
        "knows, thinks": "ok",
        "knows, never": "warning",
        "knows, empty": "warning",
        "unknown, thinks": "warning",
    }


def test_a_draft_that_rotates_otherwise_is_found(healthy: Path) -> None:
    facts = gather(options(healthy, "eagle3"))
    assert facts.config
    other = facts.config.model_copy(update={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    found = {f.check: f for f in diagnose(facts._replace(config=other)).findings}["rope"]
    assert found.level == "warning"
    assert "rope_theta 500000.0 differs from the verifier's 10000.0" in found.sentence


def test_scaling_that_a_draft_does_without_is_named(healthy: Path) -> None:
    facts = gather(options(healthy, "eagle3"))
    verifier = facts.verifier.model_copy(update={"rope_left_out": "longrope"})
    finding = {f.check: f for f in diagnose(facts._replace(verifier=verifier)).findings}["rope"]
    assert (finding.level, "without its longrope scaling" in finding.sentence) == ("ok", True)


def test_the_first_rank_looks_at_the_on_policy_share_before_training(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill_cache(world, lambda following: torch.randn(len(following), 16).bfloat16())
    facts = gather(options(world))
    check_before_training(facts, talk=False)
    assert capsys.readouterr().err == ""
    check_before_training(facts)
    assert "warning: on-policy: " in capsys.readouterr().err


def test_a_full_disk_is_found(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(healthy)
    for free, level in ((10, "error"), (200_000, "warning")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert findings(healthy)["disk"].level == level


@pytest.mark.parametrize("most", [2, 6, 12, 40])
def test_expected_anchor_coverage_is_what_training_logs(tmp_path: Path, most: int) -> None:
    row = tiny_row(lengths=(30, 34), supervised_from=6)
    draft = tiny_draft(tiny_verifier(tmp_path / "v"), "dflash", max_anchors=most, block_size=5)
    logged = [draft.step(row, torch.Generator().manual_seed(seed)).metrics["anchor_coverage"] for seed in range(40)]
    mean = sum(metric.total for metric in logged) / sum(metric.out_of for metric in logged)
    assert anchor_coverage(samples_of(row), most, 4, len(row.ids)) == pytest.approx(mean, abs=0.05)


def samples_of(row: Batch) -> list[TokenizedSample]:
    parts = [row.document_ids == n for n in (0, 1)]
    return [TokenizedSample("", "", "", row.ids[p].numpy(), row.loss_mask[p].numpy()) for p in parts]


def test_warnings_are_a_line_each_and_do_not_stop_a_run(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_before_training(gather(options(healthy, max_anchors=1)))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("warning: anchors: ")
    assert err.count("\n") == 1


def test_the_command_takes_a_run_a_file_or_options_and_its_code_says_whether_it_may_start(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor(*arguments: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["speculators", "doctor", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, capsys.readouterr().out

    assert doctor(*flags(world))[0] == 0
    run = world / "run"
    run.mkdir()
    (run / "run.yaml").write_text(options(world).model_dump_json())
    code, out = doctor(run, "--json")
    assert (code, {f["level"] for f in json.loads(out)["findings"]}) == (0, {"ok"})
    assert doctor("--config", run / "run.yaml")[0] == 0
    code, out = doctor(run / "run.yaml", "--mask-token-id", 1)
    assert (code, "error" in out) == (1, True)
    assert doctor(world)[0] == 2

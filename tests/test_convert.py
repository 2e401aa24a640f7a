"""Drafts of other formats become ours with nothing changed that is served, or are refused in one sentence."""

import json

import pytest
import torch
from foreign_drafts import write_ours, write_research, write_zlab
from safetensors.torch import load_file, save_file
from tiny import D, V, tiny_draft, tiny_row, tiny_verifier

from speculators import checkpoint
from speculators.algorithms import objective_of
from speculators.cli.convert import command
from speculators.convert import ConvertOptions, convert
from speculators.data.vocab import VocabMap
from speculators.errors import UserError
from speculators.schema import read_json_dict, write_json


@pytest.fixture
def verifier(tmp_path):
    return tiny_verifier(tmp_path / "v")


def converted(tmp_path, source, verifier):
    record = convert(ConvertOptions(source=source, verifier=verifier.path, output=tmp_path / "out"))
    return record, checkpoint.read_config(tmp_path / "out"), checkpoint.read_tensors(tmp_path / "out")


def whole_vocabulary(verifier):
    """A dflash draft that proposes every token, as z-lab's do."""
    small = tiny_draft(verifier, "dflash", block_size=4)
    config = small.config.model_copy(update={"draft_vocab_size": V})
    vocab = VocabMap(torch.ones(V, dtype=torch.bool).numpy(), torch.zeros(V, dtype=torch.int64).numpy(), 1.0)
    draft = type(small).build(config, verifier, vocab, small.options)
    draft.module.load_state_dict(small.module.state_dict())
    return draft


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_ours_is_a_speculators_format_and_stays_as_it_was(tmp_path, verifier, algorithm):
    draft = tiny_draft(verifier, algorithm)
    record, config, tensors = converted(tmp_path, write_ours(tmp_path / "s", draft), verifier)
    assert (record.format, record.algorithm) == ("speculators", algorithm)
    assert config == draft.config
    for name, tensor in checkpoint.read_tensors(tmp_path / "s").items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("map_form", ["offsets", "ids", "shuffled"])
def test_a_research_draft_predicts_with_its_own_output_rows(tmp_path, verifier, map_form):
    draft = tiny_draft(verifier, "eagle3")
    record, config, tensors = converted(tmp_path, write_research(tmp_path / "s", draft, map_form), verifier)
    assert record.format == "eagle3 research"
    assert config.aux_layer_ids == (2, 4, 5), "none are named, so the default of a verifier with 8 layers"
    assert config == draft.config
    assert torch.equal(tensors["d2t"], torch.from_numpy(draft.vocab.d2t))
    assert torch.equal(tensors["embed_tokens.weight"], draft.head.embedding_VH)
    wanted = (draft.head.output_DH + 0.5).bfloat16()
    assert torch.equal(tensors["lm_head.weight"], wanted)
    loaded = objective_of(config).build(config, verifier, draft.vocab, draft.options)
    loaded.load_tensors(tensors)
    assert torch.equal(loaded.ends.output_DH, wanted)
    assert torch.equal(loaded.head.output_DH, draft.head.output_DH), "the verifier's distribution is still its own"
    assert torch.equal(loaded.checkpoint_tensors()["lm_head.weight"], wanted)
    batch = tiny_row()
    losses = [d.step(batch, torch.Generator().manual_seed(0)).loss_sum for d in (draft, loaded)]
    assert not torch.allclose(*losses)


def test_a_zlab_draft_is_the_same_network_with_layer_ids_one_higher(tmp_path, verifier):
    draft = whole_vocabulary(verifier)
    source = write_zlab(tmp_path / "s", draft)
    assert read_json_dict(source / "config.json", "")["dflash_config"]["target_layer_ids"] == [1, 3, 4]
    record, config, tensors = converted(tmp_path, source, verifier)
    assert record.format == "z-lab dflash"
    assert config == draft.config
    assert config.to_json()["sliding_window_non_causal"] is True
    loaded = type(draft).build(config, verifier, draft.vocab, draft.options)
    loaded.load_tensors(tensors)
    draft.module.load_state_dict({n: t.bfloat16().float() for n, t in draft.module.state_dict().items()})
    batch = tiny_row()
    losses = [d.step(batch, torch.Generator().manual_seed(0)).loss_sum for d in (draft, loaded)]
    assert torch.equal(*losses)


def test_a_zlab_draft_keeps_its_window_and_its_mask_embedding(tmp_path, verifier):
    own = {"use_swa": True, "swa_window_size": 6, "causal": False}
    source = write_zlab(tmp_path / "s", whole_vocabulary(verifier), dflash_config=own)
    mask = torch.randn(1, 16)
    torch.save(mask, source / "mask_embedding.pt")
    _, config, tensors = converted(tmp_path, source, verifier)
    assert (config.layer_types, config.sliding_window) == (("sliding_attention",) * 2, 6)
    assert torch.equal(tensors["mask_embedding"], mask[0].bfloat16())


def test_an_own_embedding_of_a_dflash_draft_survives_and_a_copy_of_the_verifiers_does_not(tmp_path, verifier):
    draft = whole_vocabulary(verifier)
    source = write_zlab(tmp_path / "s", draft)
    weights = load_file(source / "model.safetensors")
    mine = draft.head.embedding_VH + 1
    ends = {"embed_tokens.weight": mine, "lm_head.weight": draft.head.output_DH.clone()}
    save_file({**weights, **ends}, source / "model.safetensors")
    _, config, tensors = converted(tmp_path, source, verifier)
    assert "lm_head.weight" not in tensors
    assert torch.equal(tensors["embed_tokens.weight"], mine)
    loaded = type(draft).build(config, verifier, draft.vocab, draft.options)
    loaded.load_tensors(tensors)
    assert torch.equal(loaded.ends.embed(torch.tensor([3])), mine[[3]])


def test_rope_scaling_of_an_older_config_is_kept(tmp_path, verifier):
    scaling = {"type": "linear", "factor": 4.0}
    source = write_research(tmp_path / "s", tiny_draft(verifier, "eagle3"), rope_scaling=scaling)
    _, config, _ = converted(tmp_path, source, verifier)
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}


REFUSED = {
    "attention_bias": (write_research, {"attention_bias": True}, "attention_bias is True"),
    "activation": (write_research, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "another verifier": (write_research, {"vocab_size": 50}, "vocab_size is 50, that of .* is 40"),
    "vocabulary size": (write_research, {"draft_vocab_size": 20}, "t2d has shape .* and 24 tokens"),
    "single feature": (write_research, {"eagle_config": {"use_aux_hidden_state": False}}, "aux_hidden_state is false"),
    "layer ids": (write_research, {"eagle_aux_hidden_state_layer_ids": [2, 4, 99]}, r"layer ids \[2, 4, 99\]"),
    "quantised": (write_research, {"quantization_config": {}}, "quantised"),
    "layers": (write_research, {"num_hidden_layers": 2}, "layers.1.* is missing"),
    "unknown format": (write_research, {"architectures": ["LlamaForCausalLM"]}, "not a draft in a known format"),
    "causal": (write_zlab, {"is_causal": True}, "causal inside the block"),
    "sliding is causal": (
        write_zlab,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
        "causal inside the block",
    ),
    "window": (write_zlab, {"dflash_config": {"use_swa": True, "causal": False}}, "belong together"),
    "sinks": (write_zlab, {"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias is True"),
    "anchor": (write_zlab, {"dflash_config": {"sample_from_anchor": True}}, "sample_from_anchor is true"),
    "block size": (write_zlab, {"block_size": None}, "block_size is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_represented_is_refused_and_nothing_is_written(tmp_path, verifier, name):
    write, changes, sentence = REFUSED[name]
    draft = tiny_draft(verifier, "eagle3") if write is write_research else whole_vocabulary(verifier)
    source = write(tmp_path / "s", draft, **changes)
    with pytest.raises(UserError, match=sentence):
        converted(tmp_path, source, verifier)
    assert {p.name for p in tmp_path.iterdir()} == {"v", "s"}


def damaged(tensors, how):
    d2t = tensors["d2t"]
    if how == "map":
        tensors["d2t"] = d2t + 1
    if how == "no maps":
        del tensors["d2t"], tensors["t2d"]
    if how == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :16]
    if how == "unknown":
        tensors["fc.bias"] = torch.zeros(16)
    if how == "nan":
        tensors["norm.weight"][0] = float("nan")
    return tensors


DAMAGE = {
    "map": "d2t is no map",
    "no maps": "neither d2t nor t2d",
    "shape": r"fc.weight has shape \[16, 16\], config.json asks for \[16, 48\]",
    "unknown": "fc.bias is not part of",
    "nan": "norm.weight holds values that are not finite",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_tensors_are_named(tmp_path, verifier, how):
    source = write_research(tmp_path / "s", tiny_draft(verifier, "eagle3"))
    tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
    torch.save(damaged(tensors, how), source / "pytorch_model.bin")
    with pytest.raises(UserError, match=DAMAGE[how]):
        converted(tmp_path, source, verifier)
    assert not (tmp_path / "out").exists()


def test_a_pickle_that_would_run_code_is_refused(tmp_path, verifier):
    source = write_research(tmp_path / "s", tiny_draft(verifier, "eagle3"))
    torch.save({"fc.weight": tmp_path.joinpath}, source / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin: cannot be read as tensors"):
        converted(tmp_path, source, verifier)


def test_a_map_without_t2d_is_read_as_vllm_reads_it(tmp_path, verifier):
    draft = tiny_draft(verifier, "eagle3")
    source = write_research(tmp_path / "s", draft)
    tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
    del tensors["t2d"]
    torch.save(tensors, source / "pytorch_model.bin")
    _, _, found = converted(tmp_path, source, verifier)
    assert torch.equal(found["t2d"], torch.from_numpy(draft.vocab.t2d))
    assert int(found["t2d"].sum()) == D


def test_causal_without_a_window_means_windows_only_and_is_mended(tmp_path, verifier):
    source = write_ours(tmp_path / "s", tiny_draft(verifier, "dflash"))
    config = read_json_dict(source / "config.json", "")
    write_json(source / "config.json", {**config, "sliding_window_non_causal": False})
    record, _, _ = converted(tmp_path, source, verifier)
    assert any("sliding_window_non_causal" in note for note in record.notes)
    assert read_json_dict(tmp_path / "out" / "config.json", "")["sliding_window_non_causal"] is True


def test_the_record_changes_with_the_source_and_an_output_is_never_overwritten(tmp_path, verifier, capsys):
    source = write_ours(tmp_path / "s", tiny_draft(verifier, "eagle3"))
    arguments = [str(source), "--verifier", verifier.path, "--json", "--output"]
    command.main([*arguments, str(tmp_path / "a")], standalone_mode=False)
    first = json.loads(capsys.readouterr().out)
    assert first == read_json_dict(tmp_path / "a" / "conversion.json", "")
    with pytest.raises(UserError, match=r"--output: .* exists already"):
        command.main([*arguments, str(tmp_path / "a")], standalone_mode=False)
    weights = load_file(source / "model.safetensors")
    weights["norm.weight"][0] += 1
    save_file(weights, source / "model.safetensors")
    command.main([*arguments, str(tmp_path / "b")], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["sha256"] != first["sha256"]

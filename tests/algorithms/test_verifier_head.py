"""The frozen ends against transformers' own logits, on tiny random models of every known family."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from speculators.algorithms.verifier_head import VerifierHead
from speculators.errors import UserError
from speculators.verifier import Verifier
from speculators.verifier_families import FAMILIES

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GEMMA4 = {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 60, "global_head_dim": 16}
KINDS = [
    ("llama", {"tie_word_embeddings": False}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ("mistral", {}),
    ("phi3", {}),
    ("phi3", {"tie_word_embeddings": True}),
    ("granite", {"logits_scaling": 6.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.3}),
    ("gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    ("gemma2", {"final_logit_softcapping": 5.0}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma3_text", {"final_logit_softcapping": 7.0}),
    ("gemma3_text", {"tie_word_embeddings": False}),
    ("gemma4_text", {**GEMMA4, "final_logit_softcapping": 3.0}),
]
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MULTIMODAL = {
    "gemma3": ("gemma3_text", {"vision_config": {**VISION, "image_size": 28, "patch_size": 14}}),
    "gemma4": ("gemma4_text", {"vision_config": {**VISION, "head_dim": 8, "num_key_value_heads": 2}}),
    "mistral3": ("mistral", {"vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}}),
}
DRAFT_IDS = torch.tensor([0, 2, 3, 17, 40, 59])


def with_random_weights(model):
    """Norms of fresh weights would hide whether they scale by w or by 1 + w."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.5 if "norm" in name else 0.3) + ("norm" in name) * 0.7)
    return model.eval()


def text_model(family, path, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **changes)
    model = with_random_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.save_pretrained(path)
    return model


def assert_same_logits(model, path):
    """What the head makes of the states before the final norm is what the model itself says."""
    before_norm = []
    model.get_decoder().norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        logits = model(torch.arange(3, 20)[None]).logits[0]
    assert logits.std() > 0.1, "logits that are all alike would prove nothing"
    head = VerifierHead(Verifier.read(path), DRAFT_IDS, dtype=torch.float32)
    got = head.verifier_logits(head.normalize(before_norm[0][0]))
    torch.testing.assert_close(got, logits[:, DRAFT_IDS], atol=2e-4, rtol=1e-4)


def test_every_known_family_is_compared():
    assert {family for family, _ in KINDS} == set(FAMILIES)


@pytest.mark.parametrize(("family", "changes"), KINDS)
def test_targets_are_the_verifiers_own_logits(family, changes, tmp_path):
    assert_same_logits(text_model(family, tmp_path, **changes), tmp_path)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_a_multimodal_verifier_is_read_through_its_text_part(family, tmp_path):
    torch.manual_seed(0)
    text, parts = MULTIMODAL[family]
    sizes = {**SIZES, **(GEMMA4 if text == "gemma4_text" else {}), "model_type": text}
    config = AutoConfig.for_model(family, text_config=sizes, **parts)
    model = with_random_weights(AutoModelForImageTextToText.from_config(config, dtype=torch.float32))
    model.save_pretrained(tmp_path)
    assert_same_logits(model, tmp_path)
    read = Verifier.read(tmp_path)
    assert (read.model_type, read.hidden_size, read.head_dim, read.eos_token_ids) == (text, 32, 8, (2,))


def test_what_a_text_part_leaves_out_is_its_familys_default(tmp_path):
    text_model("gemma3_text", tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    kept = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers")
    part = {key: whole[key] for key in kept} | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": part}))
    read = Verifier.read(tmp_path)
    assert (read.num_heads, read.head_dim, read.vocab_size, read.tied) == (8, 256, 262208, True)
    assert read.rope_parameters == {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "logit_scale", 0.5),
        ("llama", "logits_scaling", 8.0),
        ("qwen3", "final_logit_softcapping", 30.0),
        ("gemma2", "logits_scaling", 8.0),
        ("granite", "lm_head_multiplier", 0.1),
        ("mistral", "lm_head_bias", True),
    ],
)
def test_a_key_that_changes_logits_in_an_unknown_way_is_refused(family, key, value, tmp_path):
    text_model(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for neutral in (None, False, 1.0):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: neutral}))
        assert Verifier.read(tmp_path).logit_scale == 1.0
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=rf"{key} {value}, which may change the logits.* wrong targets"):
        Verifier.read(tmp_path)


def test_a_bias_of_the_head_is_refused(tmp_path):
    text_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "lm_head.bias": torch.ones(60)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"has the tensor lm_head\.bias, which changes the logits"):
        VerifierHead(Verifier.read(tmp_path), DRAFT_IDS)


def test_a_model_directory_without_its_head_is_refused(tmp_path):
    text_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no tensor embed_tokens\.weight"):
        VerifierHead(Verifier.read(tmp_path), torch.arange(60))

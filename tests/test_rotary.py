"""What a draft rotates with, against transformers' own rotation of a verifier with the same config."""

import importlib

import pytest
import torch
from transformers import AutoConfig

from speculators.algorithms import ALGORITHMS, lookup
from speculators.algorithms.draft_config import DraftConfig
from speculators.algorithms.layers import Rotary
from speculators.errors import UserError
from speculators.rotary import draft_rope, todays_rope
from speculators.training.options import TrainOptions
from speculators.verifier import Verifier

D = 16
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 2, "head_dim": D,
    "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
GPT_OSS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
KINDS = {
    "default": ("llama", {"rope_type": "default"}),
    "another base": ("qwen3", {"rope_type": "default", "rope_theta": 1e6}),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "llama3": ("llama", {"rope_type": "llama3", **LLAMA3}),
    "yarn": ("qwen3", {"rope_type": "yarn", **YARN}),
    "yarn from the whole length": ("qwen3", {"rope_type": "yarn", "factor": 2.0}),
    "yarn, not rounded": ("gpt_oss", {"rope_type": "yarn", **GPT_OSS, **YARN}),
    "yarn with its own factor": ("qwen2", {"rope_type": "yarn", "attention_factor": 1.3, **YARN}),
    "yarn with two scales": ("mistral", {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, **YARN}),
    "partial": ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.75}),
    "partial linear": ("llama", {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}),
    "partial yarn": ("llama", {"rope_type": "yarn", "partial_rotary_factor": 0.5, **YARN}),
    "linear where all is seen": ("gemma3", {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}),
    "proportional where all is seen": ("gemma4", {**PROPORTIONAL, "rope_theta": 1e6}),
}


def config_of(family, rope):
    rope = {"rope_theta": 10000.0, **rope}
    if not family.startswith("gemma"):
        return AutoConfig.for_model(family, **SIZES, rope_parameters=rope)
    kinds = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    sizes = SIZES | ({"global_head_dim": D} if family == "gemma4" else {})
    return AutoConfig.for_model(f"{family}_text", **sizes, rope_parameters=kinds)


def rotated_by_transformers(family, config, x_TND):
    """The query as the family's own full-attention layers rotate it; of these, Phi-3's alone can turn heads in part."""
    if config.rope_parameters.get("partial_rotary_factor"):
        family = "phi3"
    code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = [name for name in vars(code) if name.endswith("RotaryEmbedding") and "Vision" not in name]
    rotary = getattr(code, next(name for name in kinds if "Text" in name or len(kinds) == 1))(config)
    layer = ("full_attention",) if family.startswith("gemma") else ()
    cos, sin = rotary(x_TND, torch.arange(len(x_TND))[None], *layer)
    heads_first = x_TND.transpose(0, 1)[None]
    both = () if family == "gemma4" else (heads_first,)
    rotated = code.apply_rotary_pos_emb(heads_first, *both, cos, sin)
    return (rotated if family == "gemma4" else rotated[0])[0].transpose(0, 1)


def draft_of(path, algorithm="eagle3") -> DraftConfig:
    """The config of a new draft, as a checkpoint holds it."""
    verifier = Verifier.read(path)
    options = TrainOptions(
        verifier=str(path), data="d", hidden_states="h", output="o", draft_vocab_size=24, speculator_type=algorithm,
        mask_token_id=7 if algorithm == "dflash" else None,
    )  # fmt: skip
    kind = lookup(algorithm).config
    return kind.from_json(kind.from_options(verifier, options, (2, 4, 5)).to_json(), "config.json")


@pytest.mark.parametrize("name", KINDS)
def test_a_draft_rotates_as_its_verifier_does(name, tmp_path):
    family, rope = KINDS[name]
    config = config_of(family, rope)
    config.save_pretrained(tmp_path)
    x = torch.randn(120, 2, D, generator=torch.Generator().manual_seed(0))
    got = Rotary(draft_of(tmp_path)).rows(torch.arange(120)).apply(x, None)
    expected = rotated_by_transformers(family, config, x)
    assert not torch.allclose(expected[1:], x[1:], atol=0.1)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert not Verifier.read(tmp_path).rope_left_out


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_vllm_reads_of_a_layer_says_what_the_draft_has(algorithm, tmp_path):
    """A verifier with biases and heads of their own size: the draft has such heads and no biases, and says both."""
    AutoConfig.for_model("llama", **SIZES | {"head_dim": 24}, attention_bias=True, mlp_bias=True).save_pretrained(
        tmp_path
    )
    draft = draft_of(tmp_path, algorithm)
    layer = draft.to_json()["transformer_layer_config"]
    assert (layer["head_dim"], layer["attention_bias"], layer["mlp_bias"]) == (24, False, False)
    shapes = draft.tensor_shapes()
    assert shapes["layers.0.self_attn.o_proj.weight"] == (32, 2 * 24)
    assert not [name for name in shapes if name.endswith("bias")]


def test_scaling_that_trainer_and_server_would_do_differently_is_left_out_and_named():
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    older = {"type": "longrope", **factors}
    config = {**SIZES, "rope_theta": 5e5, "rope_scaling": older, "partial_rotary_factor": 0.75}
    without = {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.75}
    assert draft_rope(config) == (without, "longrope")
    scaled = {"rope_theta": 1e6, "factor": 8.0, **PROPORTIONAL}
    assert draft_rope({"rope_parameters": {"full_attention": scaled}}) == (
        {"rope_theta": 1e6, "rope_type": "default"},
        "proportional",
    )


BEFORE_YARN = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ({}, {"rope_theta": 7.0, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0},
        ),
        ({"rope_parameters": {"rope_theta": 9.0}}, {"rope_theta": 9.0, "rope_type": "default"}),
        (
            {**BEFORE_YARN, "rope_scaling": {"rope_type": "yarn", "factor": None}},
            {"rope_theta": 7.0, "rope_type": "yarn", "original_max_position_embeddings": 32, "factor": 4.0},
        ),
        (  # the first Phi-3 called its kind of scaling so
            {"rope_scaling": {"type": "yarn", "long_factor": [2.0], "short_factor": [1.0]}},
            {"rope_theta": 7.0, "rope_type": "longrope", "long_factor": [2.0], "short_factor": [1.0]},
        ),
    ],
)
def test_older_and_incomplete_parameters_are_read_as_todays(layer, expected):
    assert todays_rope(layer, 7.0) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_draft_that_vllm_would_rotate_differently_is_refused(algorithm, tmp_path):
    AutoConfig.for_model("llama", **SIZES).save_pretrained(tmp_path)
    raw = draft_of(tmp_path, algorithm).to_json()
    raw["transformer_layer_config"]["rope_parameters"] = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(UserError, match="rope_parameters: rope_type 'longrope' is not rotated alike"):
        lookup(algorithm).config.from_json(raw, "config.json")

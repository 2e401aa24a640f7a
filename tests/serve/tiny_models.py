"""A tiny verifier directory with random weights, and random drafts for any verifier."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from speculators import checkpoint
from speculators.algorithms.dflash.config import DFlashConfig
from speculators.algorithms.draft_config import DraftConfig
from speculators.algorithms.eagle3.config import Eagle3Config
from speculators.schema import write_json
from speculators.verifier import Verifier

DRAFT_VOCABULARY = 512


def write_models(root: Path, *algorithms: str) -> None:
    """The tiny verifier in `root / "verifier"`, and for it a random draft of each algorithm under its name."""
    write_tiny_verifier(root / "verifier")
    for algorithm in algorithms:
        write_random_draft(root / algorithm, algorithm, root / "verifier")


def write_tiny_verifier(path: Path, hidden_size: int = 64, num_layers: int = 8) -> Path:
    """A Llama of 64-wide layers whose weights transformers loads."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": 192,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    path.mkdir(parents=True)
    write_json(path / "config.json", config)
    (path / "tokenizer.json").write_text("{}")
    shapes = {"model.embed_tokens.weight": (1024, hidden_size), "model.norm.weight": (hidden_size,)}
    for n in range(num_layers):
        shapes |= {
            f"model.layers.{n}.self_attn.q_proj.weight": (64, hidden_size),
            f"model.layers.{n}.self_attn.k_proj.weight": (32, hidden_size),
            f"model.layers.{n}.self_attn.v_proj.weight": (32, hidden_size),
            f"model.layers.{n}.self_attn.o_proj.weight": (hidden_size, 64),
            f"model.layers.{n}.mlp.gate_proj.weight": (192, hidden_size),
            f"model.layers.{n}.mlp.up_proj.weight": (192, hidden_size),
            f"model.layers.{n}.mlp.down_proj.weight": (hidden_size, 192),
            f"model.layers.{n}.input_layernorm.weight": (hidden_size,),
            f"model.layers.{n}.post_attention_layernorm.weight": (hidden_size,),
        }
    save_file(_random(shapes), path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_random_draft(path: Path, algorithm: str, verifier: Path) -> Path:
    """A checkpoint with random weights and a draft vocabulary of every second token."""
    facts = Verifier.read(verifier)
    size = min(DRAFT_VOCABULARY, facts.vocab_size // 2)
    shape: dict[str, Any] = {
        **DraftConfig.shape_of(facts, size),
        "num_layers": 1,
        "aux_layer_ids": facts.default_aux_layer_ids(),
    }
    config: DraftConfig = (
        Eagle3Config(ttt_steps=3, **shape)
        if algorithm == "eagle3"
        else DFlashConfig(block_size=8, mask_token_id=5, **shape)
    )
    tensors = _random({name: s for name, s in config.tensor_shapes().items() if name not in ("d2t", "t2d")})
    ids = torch.arange(size) * 2
    tensors |= {"d2t": ids - torch.arange(size), "t2d": torch.zeros(facts.vocab_size, dtype=torch.bool)}
    tensors["t2d"][ids] = True
    checkpoint.write(path, config.to_json(), tensors)
    return path


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.05
        tensors[name] = values.bfloat16()
    return tensors

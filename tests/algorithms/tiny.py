"""A tiny random verifier on disk, a packed row of made-up text, and drafts for it."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from speculators.algorithms import lookup, objective_of
from speculators.algorithms.base import Algorithm, Batch
from speculators.data.vocab import VocabMap
from speculators.training.options import TrainOptions
from speculators.verifier import Verifier

H, V, D, LAYERS = 16, 40, 24, 8


def tiny_verifier(path: Path, **changes) -> Verifier:
    """Only what a draft's training reads: config, embedding, final norm, output rows."""
    generator = torch.Generator().manual_seed(0)
    config = {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": H, "intermediate_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": V, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "max_position_embeddings": 128,
        "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, **changes,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        "model.embed_tokens.weight": torch.randn(V, H, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(H, generator=generator),
        "lm_head.weight": torch.randn(V, H, generator=generator),
    }
    save_file({name: t.bfloat16() for name, t in tensors.items()}, path / "model.safetensors")
    return Verifier.read(path)


def tiny_vocab() -> VocabMap:
    """Every token but the 16 rarest is in the draft vocabulary."""
    return VocabMap.from_counts(np.arange(V, 0, -1, dtype=np.int64), D)


def tiny_row(lengths=(9, 12), supervised_from=3, seed=0, aux=3) -> Batch:
    """Documents of these lengths; each supervised from its token `supervised_from` on."""
    generator = torch.Generator().manual_seed(seed)
    T = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Batch(
        ids=torch.randint(0, V, (T,), generator=generator),
        positions=positions,
        document_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        loss_mask=positions >= supervised_from,
        aux_hidden=torch.randn(T, aux, H, generator=generator).bfloat16(),
        last_hidden=torch.randn(T, H, generator=generator).bfloat16(),
        sample_ids=tuple(f"{n:016x}" for n in range(len(lengths))),
    )


def document_of(batch: Batch, number: int) -> Batch:
    """One document of a row as a row of its own."""
    own = batch.document_ids == number
    cut = {name: value[own] for name, value in batch._asdict().items() if isinstance(value, torch.Tensor)}
    cut["document_ids"] = torch.zeros_like(cut["document_ids"])
    return batch._replace(**cut, sample_ids=(batch.sample_ids[number],))


def tiny_draft(verifier: Verifier, algorithm: str, **options) -> Algorithm:
    """A draft with random weights that are not symmetric in anything (norm weights included)."""
    asked = TrainOptions(
        verifier=verifier.path, data="d", hidden_states="h", output="o", speculator_type=algorithm,
        draft_vocab_size=D, **({"mask_token_id": 7} if algorithm == "dflash" else {}), **options,
    )  # fmt: skip
    config = lookup(algorithm).config.from_options(verifier, asked, (2, 4, 5))
    draft = objective_of(config).build(config, verifier, tiny_vocab(), asked)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.25 * noise)
    return draft

"""Drafts of ours written in the formats of others."""

import json

import torch
from safetensors.torch import save_file

from speculators import checkpoint


def _layer(draft):
    layer = dict(draft.config.to_json()["transformer_layer_config"])
    layer.pop("num_aux_hidden_states", None)
    return layer


def _directory(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def _stored(draft):
    return {name: t.detach().clone().contiguous() for name, t in draft.checkpoint_tensors().items()}


def write_ours(path, draft):
    checkpoint.write(path, draft.config.to_json(), draft.checkpoint_tensors())
    return path


def write_research(path, draft, map_form="offsets", **changes):
    """LlamaForCausalLMEagle3: a pickle, `midlayer`, no embedding, its own output rows, an older rope."""
    layer = _layer(draft)
    rope = layer.pop("rope_parameters")
    config = {
        **layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft.config.draft_vocab_size,
        "rope_theta": rope["rope_theta"], "rope_scaling": None, **changes,
    }  # fmt: skip
    tensors = {name.replace("layers.0.", "midlayer."): t for name, t in _stored(draft).items()}
    del tensors["embed_tokens.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 0.5
    if map_form == "ids":
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    if map_form == "shuffled":
        order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
        ids = tensors["d2t"] + torch.arange(len(order))
        tensors["d2t"] = ids[order] - torch.arange(len(order))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    path = _directory(path, config)
    torch.save(tensors, path / "pytorch_model.bin")
    return path


def write_zlab(path, draft, **changes):
    """A plain directory: dflash_config, layer ids one lower, no ends and no vocabulary map."""
    own = {
        "target_layer_ids": [k - 1 for k in draft.config.aux_layer_ids],
        "mask_token_id": draft.config.mask_token_id,
        **changes.pop("dflash_config", {}),
    }
    config = {
        **_layer(draft), "architectures": ["DFlashDraftModel"], "dflash_config": own, "sliding_window": None,
        "block_size": draft.config.block_size, **changes,
    }  # fmt: skip
    path = _directory(path, config)
    dropped = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    save_file({n: t for n, t in _stored(draft).items() if n not in dropped}, path / "model.safetensors")
    return path

"""Configs of drafts trained elsewhere, brought into ours or refused. No torch here.

Three formats: upstream's speculators format (ours is a part of it), z-lab's DFlash, EAGLE-3's research format. The
trap: what a config doesn't say has another default in each of them; those used here are vLLM's (`speculators/algos.py`,
`llama_eagle3.py`, `qwen3_dflash.py`), since vLLM is what such a checkpoint was made for.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from speculators.algorithms import lookup
from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.verifier import Verifier

Format = Literal["speculators", "z-lab dflash", "eagle3 research"]
_LAYER_MODEL_TYPES = {"eagle3": ("llama", "qwen3"), "dflash": ("qwen3",)}
_DEFAULT_TTT_STEPS = 3


class ForeignConfig(NamedTuple):
    """A config of ours made from another one.

    Attributes:
        format: what it was.
        config: with the verifier's path, revision and template hash filled in.
        notes: sentences about what was decided or left behind.
    """

    format: Format
    config: DraftConfig
    notes: tuple[str, ...]


def read_foreign_config(raw: dict[str, Any], where: str, verifier: Verifier) -> ForeignConfig:
    """Find the format and convert.

    Args:
        raw: a whole config.json.
        where: its path, for the sentences.
        verifier: whom the draft shall serve.

    Raises:
        UserError: an unknown format, something that our drafts or vLLM can't represent, or another verifier's draft.
    """
    notes: list[str] = []
    if "quantization_config" in raw or "quantization_config" in raw.get("transformer_layer_config", {}):
        raise UserError(f"{where}: quantization_config: the draft's weights are quantised; give the unquantised draft.")
    form, raw = _speculators_form(raw, where, verifier, notes)
    algorithm = str(raw["speculators_model_type"])
    entry = lookup(algorithm, f"{where}: speculators_model_type")
    layer = raw.get("transformer_layer_config") or {}
    if algorithm == "eagle3":
        _prepare_eagle3(raw, layer, where, verifier, notes)
    elif algorithm == "dflash":
        _prepare_dflash(raw, layer, where, notes)
    _refuse_layer(layer, where, _LAYER_MODEL_TYPES.get(algorithm, ()))
    config = entry.config.from_json(raw, where)
    _check_fits(config, raw, where, verifier)
    facts = {
        "verifier": verifier.path,
        "verifier_revision": verifier.revision,
        "template_hash": verifier.template_hash,
    }
    return ForeignConfig(form, config.model_copy(update=facts), tuple(notes))


def _speculators_form(
    raw: dict[str, Any], where: str, verifier: Verifier, notes: list[str]
) -> tuple[Format, dict[str, Any]]:
    """The format's name, and the config with the keys of the speculators format."""
    if "speculators_model_type" in raw:
        return "speculators", dict(raw)
    architectures = [str(name) for name in raw.get("architectures") or []]
    if "dflash_config" in raw or "DFlashDraftModel" in architectures:
        return "z-lab dflash", _from_zlab(raw, where, verifier)
    if any("Eagle3" in name for name in architectures):
        return "eagle3 research", _from_research(raw, where, verifier, notes)
    raise UserError(
        f"{where}: architectures {architectures}: not a draft in a known format; known are the speculators format "
        "(eagle3, dflash), z-lab's DFlash (dflash_config) and EAGLE-3's (LlamaForCausalLMEagle3)."
    )


def _from_zlab(raw: dict[str, Any], where: str, verifier: Verifier) -> dict[str, Any]:
    own = raw.get("dflash_config") or {}
    block_size: Any = own.get("block_size", raw.get("block_size"))
    for key, value in (
        ("dflash_config.target_layer_ids", own.get("target_layer_ids")),
        ("dflash_config.mask_token_id", own.get("mask_token_id")),
        ("block_size", block_size),
    ):
        if value is None:
            raise UserError(f"{where}: {key} is missing; a z-lab DFlash config has it.")
    unknown = {"attention_sink_bias": False, "attention_value_scale": None, "use_aux_hidden_state": True}
    for key, needed in unknown.items():
        if own.get(key, needed) != needed:
            raise UserError(f"{where}: dflash_config.{key} is {own[key]}; drafts here have no such thing.")
    layer = dict(raw)
    if own.get("use_swa") and "sliding_attention" not in (raw.get("layer_types") or []):
        layer["layer_types"] = ["sliding_attention"] * raw.get("num_hidden_layers", 0)
    layer["sliding_window"] = own.get("swa_window_size", raw.get("sliding_window"))
    sliding = "sliding_attention" in (layer.get("layer_types") or [])
    causal = next((v for v in (raw.get("is_causal"), own.get("causal")) if v is not None), sliding)
    return {
        **_foreign_head("dflash", block_size - 1, raw, verifier),
        "transformer_layer_config": layer,
        # z-lab names the layer that a stream leaves, ours the one that it enters.
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
        "block_size": block_size,
        "mask_token_id": own["mask_token_id"],
        "sample_from_anchor": own.get("sample_from_anchor", False),
        "sliding_window_non_causal": not causal,
        "is_causal": causal,
        "learn_mask_embedding": raw.get("learn_mask_embedding", False),
    }


def _from_research(raw: dict[str, Any], where: str, verifier: Verifier, notes: list[str]) -> dict[str, Any]:
    own = raw.get("eagle_config") or {}
    if not own.get("use_aux_hidden_state", True):
        raise UserError(f"{where}: eagle_config.use_aux_hidden_state is false; drafts here read the verifier's layers.")
    notes.append(f"{_DEFAULT_TTT_STEPS} speculative tokens: the format doesn't say how many it was trained for")
    return {
        **_foreign_head("eagle3", _DEFAULT_TTT_STEPS, raw, verifier),
        "transformer_layer_config": dict(raw),
        "eagle_aux_hidden_state_layer_ids": raw.get("eagle_aux_hidden_state_layer_ids")
        or own.get("eagle_aux_hidden_state_layer_ids"),
        "norm_before_residual": raw.get("norm_before_residual", False),
        "norm_before_fc": own.get("norm_before_fc", raw.get("norm_before_fc", False)),
        "fc_norm": raw.get("fc_norm", False),
        "norm_output": raw.get("norm_output", False),
    }


def _foreign_head(algorithm: str, tokens: int, raw: dict[str, Any], verifier: Verifier) -> dict[str, Any]:
    return {
        "speculators_model_type": algorithm,
        "speculators_config": {
            "proposal_methods": [{"speculative_tokens": tokens}],
            "verifier": {"name_or_path": verifier.path},
        },
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "target_hidden_size": raw.get("target_hidden_size"),
    }


def _prepare_eagle3(
    raw: dict[str, Any], layer: dict[str, Any], where: str, verifier: Verifier, notes: list[str]
) -> None:
    if not raw.get("eagle_aux_hidden_state_layer_ids"):
        raw["eagle_aux_hidden_state_layer_ids"] = list(verifier.default_aux_layer_ids())
        notes.append(f"layers {raw['eagle_aux_hidden_state_layer_ids']}: none are named, so vLLM's default is meant")
    if "sliding_attention" in (layer.get("layer_types") or []):
        raise UserError(f"{where}: layer_types has sliding_attention; eagle3 drafts here see the whole context.")


def _prepare_dflash(raw: dict[str, Any], layer: dict[str, Any], where: str, notes: list[str]) -> None:
    if raw.get("sample_from_anchor", False):
        raise UserError(f"{where}: sample_from_anchor is true; blocks here hold the last real token in slot 0.")
    sliding = "sliding_attention" in (layer.get("layer_types") or [])
    if not raw.get("sliding_window_non_causal", True):
        if sliding or raw.get("is_causal"):
            raise UserError(
                f"{where}: its layers are causal inside the block (sliding_window_non_causal false, or causal); "
                "drafts here are bidirectional."
            )
        notes.append("sliding_window_non_causal is set true: no layer slides, and false would make vLLM treat all so")
    tokens = (raw.get("speculators_config") or {}).get("proposal_methods", [{}])[0].get("speculative_tokens")
    if raw.get("block_size") and tokens != raw["block_size"] - 1:
        notes.append(f"{raw['block_size'] - 1} speculative tokens, a whole block, where its config says {tokens}")


def _refuse_layer(layer: dict[str, Any], where: str, model_types: Sequence[str]) -> None:
    """What the layers of drafts here don't have."""
    model_type = layer.get("model_type", model_types[0])
    if model_type not in model_types:
        raise UserError(f"{where}: layers of model_type {model_type!r}; known here are {', '.join(model_types)}.")
    rope = layer.get("rope_parameters") or {}
    for key, found, needed in (
        ("attention_bias", layer.get("attention_bias") or False, False),
        ("mlp_bias", layer.get("mlp_bias") or False, False),
        ("hidden_act", layer.get("hidden_act", "silu"), "silu"),
        ("logit_scale", layer.get("logit_scale", 1.0), 1.0),
        ("is_neox_style", layer.get("is_neox_style", True), True),
    ):
        if found != needed:
            raise UserError(f"{where}: {key} is {found!r}; layers of drafts here need {needed!r}.")
    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{where}: rope_parameters differ by layer type; drafts here have one set for all layers.")


def _check_fits(config: DraftConfig, raw: dict[str, Any], where: str, verifier: Verifier) -> None:
    """The draft is one for this verifier, as far as sizes tell."""
    for key, found, needed in (
        ("hidden_size", config.hidden_size, verifier.hidden_size),
        ("target_hidden_size", raw.get("target_hidden_size") or verifier.hidden_size, verifier.hidden_size),
        ("vocab_size", config.vocab_size, verifier.vocab_size),
    ):
        if found != needed:
            raise UserError(f"{where}: {key} is {found}, that of {verifier.path} is {needed}; give its own --verifier.")
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise UserError(
            f"{where}: draft_vocab_size is {config.draft_vocab_size}; allowed are 1 to {config.vocab_size}."
        )
    ids = list(config.aux_layer_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > verifier.num_layers:
        raise UserError(
            f"{where}: layer ids {ids} (counted as the layer that a stream enters) are not ascending ids of the "
            f"verifier's {verifier.num_layers} layers; vLLM would give the draft other streams."
        )

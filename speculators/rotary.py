"""Rotary parameters in one form, and what of its verifier's a draft takes over. No torch.

The trap: a draft rotates as its own config says, through transformers' tables in training and vLLM's when served. Only
kinds that both compute alike, whatever the context length, may be in a draft's config.
"""

from typing import Any, NamedTuple

_COMMON = ("rope_type", "rope_theta", "partial_rotary_factor")
# Not longrope and dynamic, whose frequencies vLLM chooses by the served length and transformers by the sequence's.
SHARED_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
    "proportional": (),
}  # fmt: skip
"""`rope_type` -> its own keys, as transformers' `modeling_rope_utils.py` and vLLM's `get_rope` both read them."""

_NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn")


class DraftRope(NamedTuple):
    """What a draft rotates with, and the kind of scaling of its verifier that it does without ("" for none)."""

    parameters: dict[str, Any]
    left_out: str


def draft_rope(config: dict[str, Any]) -> DraftRope:
    """The rotary parameters of a draft for the verifier with this config (its text part).

    A family whose layers rotate in different ways (Gemma) names a set for each kind. A draft's layers see everything,
    so they take the set of the full-attention layers.
    """
    sets = config.get("rope_parameters") or {}
    if "full_attention" in sets:
        config = {**config, "rope_parameters": sets["full_attention"]}
    parameters = todays_rope(config, 10000.0)
    kind = parameters["rope_type"]
    # vLLM's proportional kind knows no factor.
    if kind in SHARED_TYPES and not (kind == "proportional" and parameters.get("factor", 1.0) != 1.0):
        kept = (*_COMMON, *SHARED_TYPES[kind])
        return DraftRope({key: value for key, value in parameters.items() if key in kept}, "")
    kept = _COMMON if kind != "proportional" else _COMMON[:2]  # there the share has another meaning
    return DraftRope({key: value for key, value in parameters.items() if key in kept} | {"rope_type": "default"}, kind)


def todays_rope(layer: dict[str, Any], default_theta: float) -> dict[str, Any]:
    """The rotary parameters of a config of transformers 5 (`rope_parameters`) or older (`rope_theta`, `rope_scaling`,
    `partial_rotary_factor` beside it), in the newer form; a kind of scaling gets the length that it starts from.

    Args:
        layer: a config with one set of rotary parameters.
        default_theta: the base when the config names none.
    """
    named = {
        key: value
        for key, value in (layer.get("rope_parameters") or layer.get("rope_scaling") or {}).items()
        if value is not None
    }
    older = named.pop("type", None)
    kind = named.pop("rope_type", None) or older or "default"
    if "long_factor" in named:  # whatever name early Phi-3 configs give it
        kind = "longrope"
    theta = named.pop("rope_theta", None) or layer.get("rope_theta") or default_theta
    share = named.pop("partial_rotary_factor", None) or layer.get("partial_rotary_factor") or 1.0
    parameters = {"rope_theta": theta, "rope_type": kind, **({"partial_rotary_factor": share} if share != 1 else {})}
    if kind in _NEEDS_ORIGINAL_LENGTH:
        whole = layer.get("max_position_embeddings")
        # The one beside them counts more, as in transformers.
        start = layer.get("original_max_position_embeddings") or named.get("original_max_position_embeddings") or whole
        named["original_max_position_embeddings"] = start
        if "factor" not in named and whole:
            named["factor"] = whole / start
    return parameters | named

"""How each known family makes logits of its last hidden state: kind of final norm, soft-cap, scale. No torch.

The trap: a key that one family knows may stand in another one's config (a fork, a newer release) and change the logits
of whoever reads it. Targets made without it would be wrong, so a key that sounds like it and is not known is refused.
"""

import re
from typing import Any, Literal, NamedTuple

from speculators.errors import UserError

NormKind = Literal["plain", "one_plus"]


class Family(NamedTuple):
    """Source: each family's `*RMSNorm.forward` and `*ForCausalLM.forward` in transformers.

    Attributes:
        norm: RMSNorm scales by w (plain), or by 1 + w.
        softcap_key: config key of c in c * tanh(logits / c), which the family applies unless it is None.
        divisor_key: config key of what the logits are divided by.
        tied: whether the output rows are the embedding when the config says nothing.
    """

    norm: NormKind = "plain"
    softcap_key: str | None = None
    divisor_key: str | None = None
    tied: bool = False


_GEMMA = Family("one_plus", softcap_key="final_logit_softcapping", tied=True)

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "mistral": Family(),
    "phi3": Family(),
    "granite": Family(divisor_key="logits_scaling"),
    "gpt_oss": Family(),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA._replace(norm="plain"),
}
"""By the `model_type` of the text part."""

_SOUNDS_LIKE_LOGITS = re.compile(r"logit|lm_head|soft_?cap|output_multiplier|norm_type|final_.*norm|norm_.*offset")
_OTHER_LOGITS = re.compile(r"attn|attention|router")


class LogitFacts(NamedTuple):
    """What stands between the last hidden state and the logits, apart from weights.

    Attributes:
        norm: kind of the final norm.
        softcap: c, or None.
        scale: what the product with the output rows is multiplied by, before the soft-cap.
        tied: whether the output rows are the embedding.
    """

    norm: NormKind
    softcap: float | None
    scale: float
    tied: bool


def logit_facts(config: dict[str, Any], where: str) -> LogitFacts:
    """Read them from the text part of a verifier's config.

    Raises:
        UserError: the family is not known, or the config has a key that may change its logits in a way not known here.
    """
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        raise UserError(
            f"--verifier: {where} is of the family {model_type!r}, whose final norm and logits are not known here; "
            f"known families are {', '.join(sorted(FAMILIES))}."
        )
    known = {family.softcap_key, family.divisor_key}
    for key, value in config.items():
        if key not in known and _changes_logits(key, value):
            raise UserError(
                f"--verifier: {where} has {key} {value!r}, which may change the logits in a way that is not known here "
                f"for the family {model_type!r}, and a draft would learn wrong targets; give a verifier without it."
            )
    softcap = config.get(family.softcap_key) if family.softcap_key else None
    divisor = config.get(family.divisor_key) if family.divisor_key else None
    return LogitFacts(
        norm=family.norm,
        softcap=float(softcap) if softcap else None,
        scale=1.0 / divisor if divisor else 1.0,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
    )


def _changes_logits(key: str, value: Any) -> bool:
    """Whether a key sounds so and its value is not one that leaves everything as it is."""
    sounds = _SOUNDS_LIKE_LOGITS.search(key) and not _OTHER_LOGITS.search(key)
    return bool(sounds) and (value is True or (bool(value) and value != 1))

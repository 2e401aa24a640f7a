"""Facts about the verifier, read from its config and tokenizer files alone: no torch, no weights loaded.

The trap: two verifiers with equal shapes can still differ, so a draft and its hidden states are tied to `revision`
(a hash of config and weights), `template_hash` and `tokenizer_hash`, not to a path.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from speculators.errors import UserError
from speculators.rotary import draft_rope
from speculators.schema import Strict, read_json_dict
from speculators.verifier_families import FAMILIES, NormKind, logit_facts

# What the parts of a multimodal config may say together (whether ends are tied, the outer one decides), and what a text
# part that is written in full says.
_TIED = "tie_word_embeddings"
_SHARED_KEYS = ("model_type", "pad_token_id", "bos_token_id", "eos_token_id")
_NEVER_MISSING = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters",
)  # fmt: skip
_HASHED_TAIL_BYTES = 1 << 20
_VOCABULARY_FILES = (
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "added_tokens.json",
)  # fmt: skip


class Verifier(Strict):
    """The verifier's facts. Sizes are counts of elements; `rope_parameters` is what a draft rotates with,
    `rope_left_out` the kind of scaling that a draft does without."""

    path: str
    model_type: str
    revision: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_kind: NormKind
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    final_softcap: float | None
    logit_scale: float
    tied: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    bos_token_id: int | None
    template_hash: str
    tokenizer_hash: str = "none"
    rope_left_out: str = ""

    @classmethod
    def read(cls, path: str | Path) -> "Verifier":
        """Read the facts of a Hugging Face model directory.

        Raises:
            UserError: no such directory, no config, or a family whose final norm and logits are unknown here.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise UserError(f"--verifier: {path} is not a directory; give the path of a Hugging Face model directory.")
        outer = read_json_dict(directory / "config.json", "a Hugging Face model config")
        if "speculators_model_type" in outer:
            raise UserError(f"--verifier: {path} holds a draft ({outer['speculators_model_type']}); give the verifier.")
        config = _text_part(outer, directory)
        logits = logit_facts(config, str(path))
        rope = draft_rope(config)
        try:
            return cls(
                path=str(directory.resolve()),
                model_type=config["model_type"],
                revision=weights_revision(directory),
                num_layers=config["num_hidden_layers"],
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                vocab_size=config["vocab_size"],
                norm_kind=logits.norm,
                rms_norm_eps=config["rms_norm_eps"],
                rope_parameters=rope.parameters,
                max_position_embeddings=config["max_position_embeddings"],
                final_softcap=logits.softcap,
                logit_scale=logits.scale,
                tied=logits.tied,
                eos_token_ids=_eos(directory, config),
                pad_token_id=config.get("pad_token_id"),
                bos_token_id=config.get("bos_token_id"),
                template_hash=template_hash(directory),
                tokenizer_hash=tokenizer_hash(directory),
                rope_left_out=rope.left_out,
            )
        except KeyError as error:
            raise UserError(
                f"{directory / 'config.json'}: the key {error} is missing; is this a model's config?"
            ) from None

    @property
    def made_with(self) -> str:
        """Names weights, config and chat template: what tokens of a conversation were made with."""
        return f"{self.revision}/{self.template_hash}"

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer (transformers is imported on first use, torch is not needed)."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)

    def default_aux_layer_ids(self) -> tuple[int, ...]:
        """Three layers (early, middle, late) whose input streams feed the draft: 2, n/2 and n - 3 of n layers, the
        low / mid / high features of the EAGLE-3 paper and vLLM's default for eagle3. Of fewer than seven layers two or
        one, since vLLM gives a layer's stream once only."""
        n = self.num_layers
        return tuple(sorted({min(max(layer, 0), n - 1) for layer in (2, n // 2, n - 3)}))


def template_hash(directory: Path) -> str:
    """Short hash of the chat template; "none" when there is none."""
    jinja = directory / "chat_template.jinja"
    if jinja.exists():
        template = jinja.read_text(encoding="utf-8")
    else:
        config = directory / "tokenizer_config.json"
        named = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.exists() else None
        template = json.dumps(named) if isinstance(named, list) else named or ""
    return hashlib.sha256(template.encode()).hexdigest()[:16] if template else "none"


def tokenizer_hash(directory: Path) -> str:
    """Short hash of the vocabulary and merges; "none" when there are no such files. `tokenizer.json` holds both, so
    the older files beside it, which transformers doesn't read then, don't count."""
    whole = directory / "tokenizer.json"
    files = [whole] if whole.exists() else [f for name in _VOCABULARY_FILES if (f := directory / name).exists()]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}".encode() + file.read_bytes())
    return digest.hexdigest()[:16] if files else "none"


def _text_part(outer: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The config of the text model: the whole of it, or the text part of a multimodal one.

    Such a part may be written without what equals its family's defaults; transformers, which left it out, fills it in.
    """
    inner = outer.get("text_config")
    if not isinstance(inner, dict):
        return outer
    config = inner | {key: outer[key] for key in _SHARED_KEYS if key in outer and inner.get(key) is None}
    config |= {_TIED: outer[_TIED]} if _TIED in outer else {}
    if config.get("model_type") not in FAMILIES or all(key in config for key in _NEVER_MISSING):
        return config
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.for_model(**config).to_dict())
    except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{directory / 'config.json'}: text_config cannot be read ({reason}).") from None


def _eos(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id") if generation.exists() else None
    eos = config.get("eos_token_id") if eos is None else eos
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def weights_revision(directory: Path) -> str:
    """Hash of the config and of each weight file's size and last MiB: cheap, and it differs between fine-tunes."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as weights:
            weights.seek(max(0, size - _HASHED_TAIL_BYTES))
            digest.update(f"{file.name}:{size}".encode() + weights.read())
    return digest.hexdigest()[:16]

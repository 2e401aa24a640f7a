"""Can this be served? A model's place, a draft against its verifier, its vocabulary maps, and the number of speculative
tokens. Reads configs and the two small map tensors, no weights and no torch."""

import re
from pathlib import Path
from typing import Any

from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.schema import read_json_dict
from speculators.verifier import template_hash, weights_revision

# Families whose vLLM class relays the layers' streams between pipeline stages (`supports_aux_hidden_states_over_pp` in
# vLLM 0.32's models; a subclass has it too). Only the GPU model runner does it.
_PIPELINED_FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "deepseek_v4", "kimi_k3", "minimax_m3", "sarvam"}
)
# Architectures of drafts in the formats that `speculators convert` reads, and of older kinds.
_FOREIGN_DRAFT = re.compile(r"Eagle3?(?:$|[A-Z])|DFlash|DSpark|Medusa|MLPSpeculator")
_REVISION = re.compile(r"[0-9a-f]{16}")


def check_model(model: str | Path) -> None:
    """A local directory must exist and hold a config; what looks like a hub id (org/name) is vLLM's to resolve.

    Raises:
        UserError: it is neither, it cannot be read, or its config is a draft's or no model's.
    """
    place = Path(model)
    try:
        present = place.exists()
        if (place / "config.json").is_file():
            _check_config(place / "config.json")
            return
    except PermissionError:
        raise UserError(f"{model}: cannot be read (permission denied); let this user read it.") from None
    if present:
        raise UserError(f"{model}: holds no config.json; give the path of a Hugging Face model directory.")
    if not is_hub_id(str(model)):
        raise UserError(
            f"{model}: neither a directory nor a hub id (org/name); give the path of a Hugging Face model directory."
        )


def _check_config(file: Path) -> None:
    """vLLM picks a model by its architecture; a draft alone is none, whatever tool made it."""
    config = read_json_dict(file, "a Hugging Face model config")
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if "speculators_model_type" in config:
        raise UserError(f"{file.parent}: is a draft ({config['speculators_model_type']}); a verifier is needed here.")
    foreign = next((name for name in names if _FOREIGN_DRAFT.search(name)), None)
    if foreign or "dflash_config" in config:
        raise UserError(
            f"{file.parent}: is a draft in another tool's format ({foreign or 'dflash_config'}); bring it into ours "
            f"with `speculators convert {file.parent} --verifier V --output DIR` and serve that."
        )
    if not names and "model_type" not in config:
        raise UserError(
            f"{file}: names neither architectures nor model_type, so it is no model's config (another tool's?); give a "
            "Hugging Face model directory."
        )


def is_hub_id(model: str) -> bool:
    """Whether `model` can be a hub id: org/name, and `org` is not a directory here (then it is a mistyped path)."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None and not Path(model).parent.exists()


def check_fits(directory: Path, config: DraftConfig, verifier: str) -> None:
    """A draft goes with a verifier of its own sizes and family; what a hub id stands for is vLLM's to check.

    Raises:
        UserError: there is no such verifier, it has other sizes, fewer layers than the draft listens to, or it is of
            another family.
    """
    try:
        check_model(verifier)
    except UserError as error:
        raise UserError(f"{directory}: its verifier is not there ({error}) Name it with --verifier.") from None
    facts = _text_config(Path(verifier))
    for key, wanted in (("hidden_size", config.hidden_size), ("vocab_size", config.vocab_size)):
        if key in facts and facts[key] != wanted:
            raise UserError(
                f"{directory}: the draft was made for a verifier with {key} {wanted}, {verifier} has {facts[key]}; "
                "serve it with its own verifier."
            )
    layers = facts.get("num_hidden_layers")
    ids = list(config.aux_layer_ids)
    if not ids or ids != sorted(set(ids)):
        raise UserError(
            f"{directory}: the draft listens to the layers {ids}, which are not ascending and distinct; vLLM would "
            "give it other streams, so write the checkpoint again."
        )
    outside = [layer for layer in ids if layer < 0 or (isinstance(layers, int) and layer > layers)]
    if outside:
        raise UserError(
            f"{directory}: the draft listens to layer {outside[0]}, {verifier} has {layers} (allowed are 0 to {layers})"
            "; serve it with its own verifier."
        )
    trained = _text_config(Path(config.verifier)).get("model_type")
    family = facts.get("model_type")
    if trained and family and trained != family:
        raise UserError(
            f"{directory}: the draft was trained for a verifier of the family {trained}, {verifier} is of {family}; "
            "serve it with its own verifier or a copy of it."
        )


def differences(config: DraftConfig, verifier: str) -> tuple[str, ...]:
    """What is allowed but may cost acceptance: other weights or another chat template than the draft was trained with.

    The served text stays the verifier's own in any case. Empty for a hub id and where the draft does not say.
    """
    place = Path(verifier)
    if not (place / "config.json").is_file():
        return ()
    notes = []
    if _REVISION.fullmatch(config.verifier_revision) and weights_revision(place) != config.verifier_revision:
        notes.append(
            f"{verifier} has other weights than the verifier that the draft was trained for (a fine-tune, a quantised "
            "copy?), so fewer tokens may be accepted."
        )
    if config.template_hash and template_hash(place) != config.template_hash:
        notes.append(
            f"{verifier} has another chat template than the draft was trained with, so fewer tokens may be accepted."
        )
    return tuple(notes)


def check_vocabulary_maps(directory: Path, config: DraftConfig) -> None:
    """A draft with its own vocabulary maps it exactly: `d2t` (offsets) and `t2d` (mask) name the same tokens.

    Raises:
        UserError: a wrong count, a token outside the verifier's vocabulary or mapped twice, or maps that disagree.
    """
    if config.draft_vocab_size == config.vocab_size:
        return
    import numpy as np
    from safetensors import safe_open

    file = directory / "model.safetensors"
    with safe_open(file, framework="np") as tensors:
        d2t, t2d = (np.asarray(tensors.get_tensor(name)) for name in ("d2t", "t2d"))
    again = "the draft's tokens would be taken for others; write the checkpoint again."
    if d2t.dtype.kind not in "iu" or t2d.dtype != np.bool_:
        raise UserError(f"{file}: d2t holds {d2t.dtype} and t2d {t2d.dtype}, they must hold whole numbers and bools.")
    marked = np.flatnonzero(t2d)
    if marked.size != config.draft_vocab_size:
        raise UserError(f"{file}: t2d marks {marked.size} tokens, config.json says {config.draft_vocab_size}; {again}")
    tokens = np.sort(np.arange(d2t.size) + d2t)
    if tokens[0] < 0 or tokens[-1] >= config.vocab_size:
        seen = tokens[0] if tokens[0] < 0 else tokens[-1]
        raise UserError(f"{file}: d2t leads to token {seen}, allowed are 0 to {config.vocab_size - 1}; {again}")
    if not np.array_equal(tokens, marked):
        number = int((tokens != marked).sum())
        raise UserError(f"{file}: d2t and t2d name different tokens ({number} of {tokens.size} differ); {again}")


def check_vocabulary_size(draft: str, verifier: str) -> None:
    """A smaller model that drafts must share the verifier's vocabulary; hub ids are vLLM's to check.

    Raises:
        UserError: the sizes differ.
    """
    sizes = [_text_config(Path(model)).get("vocab_size") for model in (draft, verifier)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise UserError(
            f"--draft: {draft} has a vocabulary of {sizes[0]} tokens, {verifier} has {sizes[1]}; give a smaller model "
            "with the same tokenizer."
        )


def check_pipeline(verifier: str, what: str, is_cpu: bool) -> None:
    """Pipeline stages must hand the verifier's inner streams on, which vLLM does for some families on GPUs.

    Raises:
        UserError: not for this one. What a hub id stands for is vLLM's to check.
    """
    family = _text_config(Path(verifier)).get("model_type")
    if is_cpu or (family and family not in _PIPELINED_FAMILIES):
        seen = "on CPUs" if is_cpu else f"for a verifier of the family {family}"
        raise UserError(
            f"--pipeline-parallel-size: vLLM refuses {what} with pipeline parallelism {seen}; use -tp, or "
            "--no-speculation."
        )


def check_tokens(directory: Path, config: DraftConfig, asked: int | None) -> int:
    """K: as asked, or as trained.

    Raises:
        UserError: fewer than one, or more than a block holds beside its anchor.
    """
    if asked is None:
        return config.num_speculative_tokens
    check_block(directory, asked, getattr(config, "block_size", None))
    return asked


def check_block(draft: Path | str, asked: int, block_size: int | None) -> None:
    """A step proposes at least one token; a block draft's at most what lies beside the anchor.

    Raises:
        UserError: it is not so.
    """
    if asked < 1 or (block_size and asked >= block_size):
        allowed = f"1 to {block_size - 1} (its block size less the anchor)" if block_size else "1 or more"
        raise UserError(f"--num-speculative-tokens: {asked} is not possible for {draft}; it allows {allowed}.")


def _text_config(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    config = read_json_dict(file, "a Hugging Face model config") if file.exists() else {}
    return dict(config.get("text_config", config))

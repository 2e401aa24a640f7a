"""Can this be served? A model's place, a draft against its verifier, and the number of speculative tokens."""

import re
from pathlib import Path
from typing import Any

from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.schema import read_json_dict


def check_model(model: str | Path) -> None:
    """A local directory must exist and hold a config; what looks like a hub id (org/name) is vLLM's to resolve.

    Raises:
        UserError: it is neither.
    """
    place = Path(model)
    if (place / "config.json").is_file():
        return
    if place.exists():
        raise UserError(f"{model}: holds no config.json; give the path of a Hugging Face model directory.")
    if not is_hub_id(str(model)):
        raise UserError(
            f"{model}: neither a directory nor a hub id (org/name); give the path of a Hugging Face model directory."
        )


def is_hub_id(model: str) -> bool:
    """Whether `model` can be a hub id: org/name, and `org` is not a directory here (then it is a mistyped path)."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) is not None and not Path(model).parent.exists()


def check_fits(directory: Path, config: DraftConfig, verifier: str) -> None:
    """A draft goes with a verifier of its own sizes; what a hub id stands for is vLLM's to check.

    Raises:
        UserError: there is no such verifier, or it has other sizes.
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


def check_tokens(directory: Path, config: DraftConfig, asked: int | None) -> int:
    """K: as asked, or as trained.

    Raises:
        UserError: fewer than one, or more than a block holds beside its anchor.
    """
    if asked is None:
        return config.num_speculative_tokens
    block_size = getattr(config, "block_size", None)
    if asked < 1 or (block_size and asked >= block_size):
        allowed = f"1 to {block_size - 1} (its block size less the anchor)" if block_size else "1 or more"
        raise UserError(f"--num-speculative-tokens: {asked} is not possible for {directory}; it allows {allowed}.")
    return asked


def _text_config(model: Path) -> dict[str, Any]:
    file = model / "config.json"
    config = read_json_dict(file, "a Hugging Face model config") if file.exists() else {}
    return dict(config.get("text_config", config))

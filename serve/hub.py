"""A draft on the hub: its `config.json` is fetched into the hub's cache, its weights are vLLM's to fetch.

Its config may come from any tool, so only what decides how to serve it is read here. The trap: vLLM asks the hub with a
revision and a token of its own, so those that are passed on to vLLM are used here too.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from serve.command import Common, ServerOptions, ServeSpec, assemble, given_flags
from serve.fit import check_block, check_model, check_pipeline
from serve.spec import MINIMUM
from speculators.errors import UserError
from speculators.schema import read_json_dict

_REACH_S = 5.0


class HubDraft(NamedTuple):
    """What a config in speculators format says; None is what it doesn't.

    Attributes:
        model: its hub id.
        verifier: a hub id or a path.
        num_speculative_tokens: K as trained.
        block_size: of a block draft, anchor included.
    """

    model: str
    algorithm: str
    verifier: str
    num_speculative_tokens: int | None
    block_size: int | None


def hub_draft(model: str, vllm_args: tuple[str, ...] = ()) -> HubDraft | None:
    """The draft that a hub id names; None for any other model.

    Args:
        vllm_args: what is passed on; `--revision` and `--hf-token` count.

    Raises:
        UserError: the hub has no such model or does not give it to this user, it cannot be reached and the model is not
            in its cache, or a draft's config is incomplete.
    """
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):  # another hub
        return None
    file = _config_file(model, given_flags(vllm_args))
    config = read_json_dict(file, "a Hugging Face model config")
    if "speculators_model_type" not in config:
        return None
    try:
        described = config["speculators_config"]
        tokens = described["proposal_methods"][0].get("speculative_tokens")
        verifier = described["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"{model}: its config.json is not complete ({error} is missing); vLLM would not load it."
        ) from None
    block_size = config.get("block_size")
    return HubDraft(
        model,
        str(config["speculators_model_type"]),
        str(verifier),
        tokens if isinstance(tokens, int) else None,
        block_size if isinstance(block_size, int) else None,
    )


def hub_draft_spec(
    draft: HubDraft,
    *,
    verifier: str | None = None,
    num_speculative_tokens: int | None = None,
    **options: Unpack[ServerOptions],
) -> ServeSpec:
    """A draft from the hub with its verifier, or with another one.

    Args:
        verifier, num_speculative_tokens: None means what the draft's config says.
        options: as in `serve.spec.plain_spec`.

    Raises:
        UserError: no such verifier here, K that the draft cannot do, pipeline parallelism that vLLM would refuse, no
            vLLM or one that is too old.
    """
    if verifier is not None:
        check_model(verifier)
    common = Common.of(options)
    asked = common.given_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
    if asked is not None:
        check_block(draft.model, asked, draft.block_size)
    common.program.check_at_least(MINIMUM.get(draft.algorithm, (0, 0)), f"{draft.algorithm} drafts")
    served = verifier or draft.verifier
    tokens = draft.num_speculative_tokens if asked is None else asked
    if common.is_pipelined:
        check_pipeline(served, f"{draft.algorithm} drafts", common.program.is_cpu)
    facts: dict[str, Any] = {"draft": draft.model, "algorithm": draft.algorithm, "num_speculative_tokens": tokens}
    if num_speculative_tokens is None and verifier is None:
        return assemble(common, draft.model, {}, verifier=draft.verifier, **facts)
    speculation = {"model": draft.model, "method": draft.algorithm, "num_speculative_tokens": tokens}
    return assemble(common, served, {"--speculative-config": json.dumps(speculation)}, verifier=served, **facts)


def _is_reachable() -> bool:
    """Whether the hub answers at all: the hub's own library tries again for half a minute, and says so each time."""
    import requests
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        requests.head(constants.ENDPOINT, timeout=_REACH_S)
    except requests.RequestException:
        return False
    return True


def _config_file(model: str, given: dict[str, str]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        file = hf_hub_download(
            model,
            "config.json",
            revision=given.get("revision"),
            token=given.get("hf-token") or None,
            local_files_only=not _is_reachable(),
        )
        return Path(file)
    except GatedRepoError:
        reason = "the hub lets only permitted users have it; ask for access on its page and log in (`hf auth login`)"
    except RevisionNotFoundError:
        reason = f"the hub has no revision {given.get('revision')} of it; see its page"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private; check its name, or log in (`hf auth login`)"
    except LocalEntryNotFoundError:
        reason = "the hub cannot be reached from here and it is not in the cache; give a local directory, or a network"
    except EntryNotFoundError:
        reason = "it holds no config.json; give a Hugging Face model"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = f"the hub did not give its config.json ({str(error).splitlines()[0]}); try again, or give a directory"
    raise UserError(f"{model}: {reason}.")

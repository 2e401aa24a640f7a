"""What to start: a draft, a plain verifier, a method without training, or an extraction server becomes a `ServeSpec`.

Everything that can be checked without starting vLLM is checked here. Nothing is started.
"""

import json
from pathlib import Path
from typing import Any, Literal, Unpack

from serve.command import Common, ServerOptions, ServeSpec, assemble
from serve.command import free_port as free_port
from serve.fit import (
    check_fits,
    check_model,
    check_pipeline,
    check_tokens,
    check_vocabulary_maps,
    check_vocabulary_size,
    differences,
)
from speculators import checkpoint
from speculators.data.extract_options import check_layer_ids
from speculators.errors import UserError
from speculators.verifier import Verifier

MINIMUM = {"dflash": (0, 20), "eagle3": (0, 18)}
MINIMUM_FOR_EXTRACTION = (0, 18)
Method = Literal["ngram", "suffix", "draft_model"]
# K when none is asked for; suffix decoding takes it as a limit, and 24 is vLLM's own (suffix_decoding_max_tree_depth).
METHOD_TOKENS: dict[Method, int] = {"ngram": 5, "suffix": 24, "draft_model": 5}
_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}  # lengths of the n-grams that are looked for in the context
_CPU_CONNECTOR = ("CpuHiddenStatesConnector", "cpu_connector")


def plain_spec(verifier: str | Path, **options: Unpack[ServerOptions]) -> ServeSpec:
    """The verifier alone.

    Args:
        verifier: model directory, or a hub id that vLLM resolves.
        options: where it listens, on how many devices, by which vLLM (`ServerOptions`).

    Raises:
        UserError: no such directory, or no vLLM.
    """
    check_model(verifier)
    return assemble(Common.of(options), str(verifier), {}, verifier=str(verifier))


def draft_spec(
    draft: str | Path,
    *,
    verifier: str | Path | None = None,
    num_speculative_tokens: int | None = None,
    **options: Unpack[ServerOptions],
) -> ServeSpec:
    """A draft with its verifier, or with another verifier of the same shape (an FP8 copy).

    Args:
        draft: checkpoint directory, or run directory (its best checkpoint).
        verifier: None means the one in the draft's config.
        num_speculative_tokens: None means as many as it was trained for.
        options: as in `plain_spec`.

    Raises:
        UserError: nothing to serve there, tensors or vocabulary maps that don't fit the config, a verifier that
            doesn't fit the draft, more speculative tokens than the draft has, pipeline parallelism that vLLM would
            refuse, no vLLM or one that is too old.
    """
    directory = checkpoint.resolve(Path(draft))
    config = checkpoint.read_config(directory)
    checkpoint.check_tensors(directory, config)
    check_vocabulary_maps(directory, config)
    served = str(verifier or config.verifier)
    check_fits(directory, config, served)
    tokens = check_tokens(directory, config, num_speculative_tokens)
    common = Common.of(options)
    common.program.check_at_least(MINIMUM.get(config.algorithm, (0, 0)), f"{config.algorithm} drafts")
    if common.is_pipelined:
        check_pipeline(served, f"{config.algorithm} drafts", common.program.is_cpu)
    facts: dict[str, Any] = {"draft": str(directory), "algorithm": config.algorithm, "num_speculative_tokens": tokens}
    notes = differences(config, served)
    if common.given_speculative_tokens:  # vLLM lays the keys of a --speculative-config over the draft's own
        facts["num_speculative_tokens"] = check_tokens(directory, config, common.given_speculative_tokens)
    if tokens == config.num_speculative_tokens and Path(served).resolve() == Path(config.verifier).resolve():
        return assemble(common, str(directory), {}, notes, verifier=config.verifier, **facts)
    speculation = {"model": str(directory), "method": config.algorithm, "num_speculative_tokens": tokens}
    return assemble(common, served, {"--speculative-config": json.dumps(speculation)}, notes, verifier=served, **facts)


def method_spec(
    verifier: str | Path,
    method: Method,
    *,
    draft: str | None = None,
    num_speculative_tokens: int | None = None,
    **options: Unpack[ServerOptions],
) -> ServeSpec:
    """The verifier with a way to speculate that needs no training, for comparisons.

    Args:
        verifier: model directory, or a hub id that vLLM resolves.
        method: `ngram` and `suffix` repeat what the context holds, `draft_model` asks a smaller model.
        draft: the smaller model (directory or hub id); only for `draft_model`, which needs it.
        num_speculative_tokens: None means 5, for `suffix` at most 24.
        options: as in `plain_spec`.

    Raises:
        UserError: no such model, one of another vocabulary size, K below 1, no vLLM, or for `suffix` a vLLM without
            the package arctic-inference.
    """
    check_model(verifier)
    if (draft is not None) != (method == "draft_model"):
        wanted = "give the smaller model" if draft is None else "only --method draft_model takes one"
        raise UserError(f"--draft: {draft or 'none'} does not go with --method {method}; {wanted}.")
    tokens = METHOD_TOKENS[method] if num_speculative_tokens is None else num_speculative_tokens
    if tokens < 1:
        raise UserError(f"--num-speculative-tokens: {tokens} is not possible for --method {method}; give 1 or more.")
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens}
    if method == "ngram":
        speculation |= _LOOKUP
    if draft is not None:
        check_model(draft)
        check_vocabulary_size(draft, str(verifier))
        speculation["model"] = draft
    common = Common.of(options)
    if method == "suffix" and not common.program.has_arctic:
        raise UserError(
            f"--method: suffix needs the package arctic-inference beside vLLM, and {common.program.python} has none; "
            f"install it there (`{common.program.python} -m pip install arctic-inference`), or use --method ngram."
        )
    flags: dict[str, str | None] = {"--speculative-config": json.dumps(speculation)}
    facts: dict[str, Any] = {"draft": draft, "algorithm": method, "num_speculative_tokens": tokens}
    return assemble(common, str(verifier), flags, verifier=str(verifier), **facts)


def extraction_spec(
    verifier: str | Path,
    aux_layer_ids: tuple[int, ...],
    storage_path: Path,
    **options: Unpack[ServerOptions],
) -> ServeSpec:
    """A server whose answers name a file with the hidden states of the prompt.

    Args:
        verifier: model directory.
        aux_layer_ids: the streams entering these layers, ascending; the last residual stream is always added.
        storage_path: where vLLM writes the files.
        options: as in `plain_spec`.

    Raises:
        UserError: layers that the verifier does not have, no such directory, pipeline parallelism that vLLM would
            refuse, no vLLM or one that is too old.
    """
    facts = Verifier.read(verifier)
    check_layer_ids(aux_layer_ids, facts)
    common = Common.of(options)
    common.program.check_at_least(MINIMUM_FOR_EXTRACTION, "hidden-state extraction")
    if common.is_pipelined:
        check_pipeline(str(verifier), "hidden-state extraction", common.program.is_cpu)
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*aux_layer_ids, facts.num_layers]}},
    }
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage_path)},
    }
    # vLLM's own connector wants pinned memory and CUDA streams; ours lies beside the entry file.
    if common.program.is_cpu:
        transfer["kv_connector"], transfer["kv_connector_module_path"] = _CPU_CONNECTOR
    flags = {
        "--speculative-config": json.dumps(speculation),
        "--kv-transfer-config": json.dumps(transfer),
        "--no-enable-prefix-caching": None,
    }
    return assemble(common, str(verifier), flags, verifier=str(verifier))

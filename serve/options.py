"""Options of `speculators serve`, and which server they ask for. What they don't name goes to vLLM untouched."""

from pathlib import Path
from typing import Any

from pydantic import Field

from serve.fit import is_hub_id
from serve.spec import ServeSpec, draft_spec, extraction_spec, plain_spec
from speculators import checkpoint
from speculators.errors import UserError
from speculators.schema import Strict
from speculators.verifier import Verifier


class ServeOptions(Strict):
    """Serve a draft with its verifier, a plain verifier, or an extraction server.

    Options not listed here go to vLLM as they are, for example --max-model-len 4096.
    """

    model: str = Field(
        description="A draft (run or checkpoint directory), a verifier directory, or a hub id.",
        json_schema_extra={"argument": True},
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every one.")
    tensor_parallel_size: int | None = Field(
        None, ge=1, description="Devices that share the model.", json_schema_extra={"flags": ["-tp"]}
    )
    verifier: str | None = Field(None, description="Another verifier for the draft, such as an FP8 copy of its own.")
    num_speculative_tokens: int | None = Field(None, description="Tokens drafted a step; default: as trained.")
    speculation: bool = Field(True, description="With --no-speculation, a draft's verifier is served alone.")
    hidden_states_path: Path | None = Field(
        None, description="Serve for extraction: directory that gets the hidden states' files."
    )
    aux_layer_ids: tuple[int, ...] = Field(
        (), description="Layers to extract, ascending; default: early, middle, late."
    )
    vllm: str | None = Field(None, description="vLLM to start: a virtual environment, a Python, or a vllm executable.")
    dry_run: bool = Field(False, description="Print command and environment, start nothing.")
    vllm_args: tuple[str, ...] = ()


def spec_of(options: ServeOptions) -> ServeSpec:
    """The server that the options ask for.

    Raises:
        UserError: options that contradict each other, or whatever the spec's builder refuses.
    """
    model = Path(options.model)
    is_draft = model.exists() and checkpoint.is_draft(model)
    _check(options, is_draft)
    common: dict[str, Any] = {
        "port": options.port,
        "host": options.host,
        "extra_args": options.vllm_args,
        "tensor_parallel_size": options.tensor_parallel_size,
        "vllm": options.vllm,
    }
    if options.hidden_states_path:
        layers = options.aux_layer_ids or Verifier.read(model).default_aux_layer_ids()
        return extraction_spec(options.model, layers, options.hidden_states_path, **common)
    if is_draft and options.speculation:
        tokens = options.num_speculative_tokens
        return draft_spec(model, verifier=options.verifier, num_speculative_tokens=tokens, **common)
    if is_draft:
        return plain_spec(options.verifier or checkpoint.read_config(checkpoint.resolve(model)).verifier, **common)
    return plain_spec(options.model, **common)


def _check(options: ServeOptions, is_draft: bool) -> None:
    given = {
        "--verifier": options.verifier,
        "--num-speculative-tokens": options.num_speculative_tokens,
        "--no-speculation": None if options.speculation else True,
    }
    wrong = [flag for flag, value in given.items() if value is not None]
    if wrong and not is_draft:
        what = "a hub id, whose config only vLLM reads" if is_hub_id(options.model) else "not a draft"
        raise UserError(
            f"{wrong[0]}: {options.model} is {what}; this option needs a draft's run or checkpoint directory."
        )
    if options.hidden_states_path and is_draft:
        raise UserError(
            f"--hidden-states-path: {options.model} is a draft; hidden states are the verifier's, give its directory."
        )
    if options.aux_layer_ids and not options.hidden_states_path:
        raise UserError("--aux-layer-ids: only for extraction; give --hidden-states-path too.")

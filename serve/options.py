"""Options of `speculators serve`, and which server they ask for. What they don't name goes to vLLM untouched."""

from pathlib import Path

from pydantic import Field, field_validator

from serve import auto_tokens
from serve.command import LOOPBACK, ServerOptions, ServeSpec
from serve.fit import is_hub_id
from serve.hub import HubDraft, hub_draft, hub_draft_spec
from serve.spec import Method, draft_spec, extraction_spec, method_spec, plain_spec
from speculators import checkpoint
from speculators.errors import UserError
from speculators.schema import Strict
from speculators.verifier import Verifier

AUTO = "auto"


class ServeOptions(Strict):
    """Serve a draft with its verifier, a plain verifier, or an extraction server.

    Options not listed here go to vLLM as they are, for example --max-model-len 4096. Servers in the background are
    looked after by `speculators serve status|logs|stop [NAME]` (a model of such a name is given as ./status).
    """

    model: str = Field(
        description="A draft (run or checkpoint directory), a verifier directory, or a hub id.",
        json_schema_extra={"argument": True},
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    host: str = Field(LOOPBACK, description="Address to listen on; 0.0.0.0 for every one (then give --api-key too).")
    tensor_parallel_size: int | None = Field(
        None, ge=1, description="Devices that share the model.", json_schema_extra={"flags": ["-tp"]}
    )
    verifier: str | None = Field(None, description="Another verifier for the draft, such as an FP8 copy of its own.")
    num_speculative_tokens: int | str | None = Field(
        None, description="Tokens drafted a step, or auto: the fastest by a bench report; default: as trained."
    )
    report: Path | None = Field(
        None, description="Bench report for auto; default: bench/ in the draft's run or beside it."
    )
    speculation: bool = Field(True, description="With --no-speculation, a draft's verifier is served alone.")
    method: Method | None = Field(
        None,
        description="Speculate with a plain verifier and no training, for comparisons; suffix needs "
        "arctic-inference, draft_model needs --draft.",
    )
    draft: str | None = Field(None, description="Smaller model for --method draft_model.")
    hidden_states_path: Path | None = Field(
        None, description="Serve for extraction: directory that gets the hidden states' files."
    )
    aux_layer_ids: tuple[int, ...] = Field(
        (), description="Layers to extract, ascending; default: early, middle, late."
    )
    daemon: str | None = Field(None, description="Serve in the background under this name.", min_length=1)
    wait: bool = Field(False, description="With --daemon: return when the server answers.")
    wait_s: float = Field(600, gt=0, description="With --wait: seconds after which it is given up and stopped.")
    vllm: str | None = Field(None, description="vLLM to start: a virtual environment, a Python, or a vllm executable.")
    dry_run: bool = Field(False, description="Print command and environment, start nothing.")
    json_output: bool = Field(
        False,
        description="Print what --dry-run, --daemon or status shows as one JSON document.",
        json_schema_extra={"flags": ["--json"]},
    )
    vllm_args: tuple[str, ...] = ()

    @field_validator("num_speculative_tokens")
    @classmethod
    def _number_or_auto(cls, value: int | str | None) -> int | str | None:
        """The command line gives text."""
        if not isinstance(value, str) or value == AUTO:
            return value
        if not value.lstrip("-").isdigit():
            raise ValueError(f"must be a whole number or {AUTO}")
        return int(value)


def spec_of(options: ServeOptions) -> ServeSpec:
    """The server that the options ask for.

    Raises:
        UserError: options that contradict each other, or whatever the spec's builder refuses.
    """
    model = Path(options.model)
    try:
        is_draft = model.exists() and checkpoint.is_draft(model)
    except PermissionError:
        raise UserError(f"{model}: cannot be read (permission denied); let this user read it.") from None
    on_hub = hub_draft(options.model, options.vllm_args) if is_hub_id(options.model) else None
    _check(options, is_draft or on_hub is not None)
    common: ServerOptions = {
        "port": options.port,
        "host": options.host,
        "extra_args": options.vllm_args,
        "tensor_parallel_size": options.tensor_parallel_size,
        "vllm": options.vllm,
    }
    if options.hidden_states_path:
        layers = options.aux_layer_ids or Verifier.read(model).default_aux_layer_ids()
        return extraction_spec(options.model, layers, options.hidden_states_path, **common)
    if on_hub:
        return _hub_spec(on_hub, options, common)
    if is_draft and options.speculation:
        return _draft_spec(model, options, common)
    if is_draft:
        return plain_spec(options.verifier or checkpoint.read_config(checkpoint.resolve(model)).verifier, **common)
    if options.method:
        tokens = options.num_speculative_tokens
        assert not isinstance(tokens, str)
        return method_spec(options.model, options.method, draft=options.draft, num_speculative_tokens=tokens, **common)
    return plain_spec(options.model, **common)


def _hub_spec(draft: HubDraft, options: ServeOptions, common: ServerOptions) -> ServeSpec:
    if not options.speculation:
        return plain_spec(options.verifier or draft.verifier, **common)
    tokens = options.num_speculative_tokens
    if not isinstance(tokens, str):
        return hub_draft_spec(draft, verifier=options.verifier, num_speculative_tokens=tokens, **common)
    raise UserError(
        f"--num-speculative-tokens: {AUTO} needs a bench report about a draft in a directory, {draft.model} is on the "
        "hub; give a number, or a directory."
    )


def _draft_spec(model: Path, options: ServeOptions, common: ServerOptions) -> ServeSpec:
    tokens = options.num_speculative_tokens
    if not isinstance(tokens, str):
        return draft_spec(model, verifier=options.verifier, num_speculative_tokens=tokens, **common)
    directory = checkpoint.resolve(model)
    config = checkpoint.read_config(directory)
    choice = auto_tokens.choose(directory, config, options.verifier or config.verifier, options.report)
    spec = draft_spec(model, verifier=options.verifier, num_speculative_tokens=choice.num_speculative_tokens, **common)
    told = f"--num-speculative-tokens auto: {choice.num_speculative_tokens} ({choice.reason})."
    return spec.model_copy(update={"notes": (*spec.notes, told)})


def _check(options: ServeOptions, is_draft: bool) -> None:
    given = {
        "--verifier": options.verifier,
        "--num-speculative-tokens": None if options.method else options.num_speculative_tokens,
        "--no-speculation": None if options.speculation else True,
    }
    wrong = [flag for flag, value in given.items() if value is not None]
    if wrong and not is_draft:
        raise UserError(f"{wrong[0]}: {options.model} is not a draft; this option needs one (a directory or a hub id).")
    for_verifiers = {"--method": options.method, "--hidden-states-path": options.hidden_states_path}
    not_for_drafts = [flag for flag, value in for_verifiers.items() if value]
    if not_for_drafts and is_draft:
        raise UserError(
            f"{not_for_drafts[0]}: {options.model} is a draft; this option is for a verifier, give its directory."
        )
    needs = (
        ("--aux-layer-ids", options.aux_layer_ids, "--hidden-states-path", options.hidden_states_path),
        ("--draft", options.draft, "--method draft_model", options.method),
        ("--report", options.report, "--num-speculative-tokens auto", options.num_speculative_tokens == AUTO),
        ("--wait", options.wait, "--daemon NAME", options.daemon),
    )
    for flag, asked, wanted, present in needs:
        if asked and not present:
            raise UserError(f"{flag}: only with {wanted}; give that too, or leave {flag} out.")
    if options.method and options.hidden_states_path:
        raise UserError("--method: an extraction server has its own; leave --method or --hidden-states-path out.")
    if options.method and options.num_speculative_tokens == AUTO:
        raise UserError(f"--num-speculative-tokens: {AUTO} is for drafts; give a number for --method {options.method}.")

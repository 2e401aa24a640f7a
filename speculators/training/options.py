"""The options of `speculators train`, each default written once. No torch here.

`only` in a field's annotation names the algorithm that knows the option; `free` marks what a resumed run may change;
`structure` what `--from-pretrained` decides.
"""

import json
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from speculators.algorithms import ALGORITHMS, lookup
from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.schema import Strict
from speculators.training.trackers import TRACKERS, check_installed

_FREE: dict[str, Any] = {"free": True}
_EAGLE3: dict[str, Any] = {"only": "eagle3"}
_DFLASH: dict[str, Any] = {"only": "dflash"}
_STRUCTURE: dict[str, Any] = {"structure": True}
_LOSSES = ("ce", "kl_div", "tv")
_GAMMA_BY_BLOCK = {8: 4.0, 10: 5.0, 16: 7.0}


class TrainOptions(Strict):
    """Train a draft on cached hidden states. A run directory that holds checkpoints is continued."""

    verifier: str = Field(description="Directory of the verifier.", json_schema_extra=_FREE)
    data: Path = Field(description="Data directory made by `speculators prepare`.", json_schema_extra=_FREE)
    hidden_states: Path | None = Field(
        None,
        description="Cache made by `speculators extract`; not needed with --vllm-endpoint.",
        json_schema_extra=_FREE,
    )
    output: Path = Field(
        description="Run directory: checkpoints, best.json, run.yaml, train.jsonl.", json_schema_extra=_FREE
    )
    speculator_type: str = Field(description=f"Algorithm: {' or '.join(ALGORITHMS)}.")

    from_pretrained: Path | None = Field(
        None,
        description="Start from a trained draft (ours, speculators format, z-lab DFlash, EAGLE-3), with its structure.",
    )
    draft_vocab_size: int = Field(
        8192,
        ge=1,
        description="Tokens the draft can propose; the verifier's size keeps all.",
        json_schema_extra=_STRUCTURE,
    )
    aux_layer_ids: tuple[int, ...] | None = Field(
        None,
        description="Layers whose input feeds the draft (default: those in the cache).",
        json_schema_extra=_STRUCTURE,
    )
    num_layers: int | None = Field(
        None, ge=1, description="Layers of the draft (default: the algorithm's).", json_schema_extra=_STRUCTURE
    )
    loss_fn: str = Field(
        "kl_div", description=f'{", ".join(_LOSSES)}, or weights as JSON: \'{{"ce": 0.1, "tv": 0.9}}\'.'
    )
    ttt_steps: int = Field(
        3, ge=1, description="Unrolled steps, and tokens drafted when served.", json_schema_extra=_EAGLE3
    )
    step_decay: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Weight in the loss of each unrolled step over the one before.",
        json_schema_extra=_EAGLE3,
    )
    norm_before_residual: bool = Field(
        False,
        description="The residual stream starts from the normed hidden state.",
        json_schema_extra=_EAGLE3 | _STRUCTURE,
    )
    norm_before_fc: bool = Field(
        False, description="Norm the verifier's features together before fc.", json_schema_extra=_EAGLE3 | _STRUCTURE
    )
    fc_norm: bool = Field(
        False, description="Norm each of the verifier's features before fc.", json_schema_extra=_EAGLE3 | _STRUCTURE
    )
    norm_output: bool = Field(
        False, description="Feed back the state after the final norm.", json_schema_extra=_EAGLE3 | _STRUCTURE
    )
    block_size: int = Field(
        8, ge=2, description="Slots of a block, the anchor's included.", json_schema_extra=_DFLASH | _STRUCTURE
    )
    max_anchors: int = Field(256, ge=1, description="Most blocks trained in each row.", json_schema_extra=_DFLASH)
    mask_token_id: int | None = Field(
        None,
        ge=0,
        description="Token id of the empty slots (default: an unused one).",
        json_schema_extra=_DFLASH | _STRUCTURE,
    )
    sliding_window: int | None = Field(
        None,
        ge=1,
        description="Context that a slot sees, in positions, its own included (default: all of it).",
        json_schema_extra=_DFLASH | _STRUCTURE,
    )
    learn_mask_embedding: bool = Field(
        False, description="Train the embedding of the empty slots.", json_schema_extra=_DFLASH | _STRUCTURE
    )
    position_weights: Literal["fixed-exp-decay", "dpace"] = Field(
        "fixed-exp-decay",
        description="A slot's weight in the loss: falling at a fixed rate, or the chance that a draft gets that far.",
        json_schema_extra=_DFLASH,
    )
    dpace_alpha: float = Field(
        0.5, ge=0, le=1, description="With dpace: smallest chance of a slot.", json_schema_extra=_DFLASH
    )
    loss_decay_gamma: float | None = Field(
        None,
        gt=0,
        description="A slot's weight in the loss falls as exp(-slot / gamma) (default: by block size).",
        json_schema_extra=_DFLASH,
    )

    epochs: int = Field(1, ge=1, description="Passes over the data.")
    max_steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps.")
    row_length: int = Field(1024, ge=2, description="Tokens of a packed row.")
    accumulate: int = Field(1, ge=1, description="Rows per optimizer step and rank.", json_schema_extra=_FREE)
    optimizer: Literal["adamw", "muon"] | None = Field(None, description="Optimizer (default: the algorithm's).")
    lr: float | None = Field(None, gt=0, description="Peak learning rate (default: the algorithm's).")
    adamw_lr: float | None = Field(
        None, gt=0, description="With muon: peak learning rate of norms and biases (default: the algorithm's)."
    )
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay of the matrices.")
    warmup_share: float = Field(0.05, ge=0, lt=1, description="Share of the steps in which the learning rate rises.")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Learning rate after the warm-up.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    seed: int = Field(0, ge=0, description="Seed of weights, row order and every random choice.")
    precision: Literal["auto", "bf16", "float32"] = Field(
        "auto",
        description="Matrix products; auto is bf16 on GPUs and on processors that have it. Weights stay float32.",
    )

    validate_every: int | None = Field(
        None,
        ge=0,
        description="Steps between validations (default: a quarter of the run; 0: never).",
        json_schema_extra=_FREE,
    )
    save_every: int | None = Field(
        None,
        ge=0,
        description="Steps between checkpoints (default: a quarter of the run; 0: at the end).",
        json_schema_extra=_FREE,
    )
    save_total_limit: int | None = Field(
        3, ge=1, description="Checkpoints kept; the best and the last are never removed.", json_schema_extra=_FREE
    )
    check_hidden_states: bool = Field(
        False,
        description="Verify the checksum of every cached sample, not of the first ones alone.",
        json_schema_extra=_FREE,
    )
    vllm_endpoint: tuple[str, ...] = Field(
        (),
        description="URLs of extraction servers that give the states which the cache lacks; auto starts one.",
        json_schema_extra=_FREE,
    )
    storage_path: Path | None = Field(
        None, description="Where those servers write (auto: a directory under /dev/shm).", json_schema_extra=_FREE
    )
    on_missing: Literal["generate", "skip", "raise"] | None = Field(
        None,
        description="Samples that the cache lacks: get them, or the run ends; get them, or leave them out; refuse to "
        "begin (default: generate with an endpoint, else raise).",
        json_schema_extra=_FREE,
    )
    on_generate: Literal["delete", "cache"] = Field(
        "delete", description="What becomes of states that a server gave.", json_schema_extra=_FREE
    )
    hidden_states_budget: float = Field(
        4.0,
        gt=0,
        description="GiB of states that may wait on the RAM disk and in memory, all ranks together.",
        json_schema_extra=_FREE,
    )
    request_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds for a request, and to wait for servers that are not up.",
        json_schema_extra=_FREE,
    )
    max_consecutive_failures: int = Field(
        10,
        ge=1,
        description="Failed requests in a row for one sample that end the run; with skip, samples left out in a row.",
        json_schema_extra=_FREE,
    )
    restart: bool = Field(False, description="Remove this run's checkpoints and begin anew.", json_schema_extra=_FREE)
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.", json_schema_extra=_FREE)
    compile: bool = Field(False, description="Compile the draft with torch.compile.", json_schema_extra=_FREE)
    fsdp: bool = Field(
        False, description="Under torchrun: shard weights and optimizer (FSDP2).", json_schema_extra=_FREE
    )
    tracker: tuple[str, ...] = Field(
        (), description=f"Also log to {', '.join(TRACKERS)} (what is installed of them).", json_schema_extra=_FREE
    )
    dry_run: bool = Field(False, description="Print what the run would be and need, and stop.", json_schema_extra=_FREE)
    json_output: bool = Field(
        False, description="Print the result as JSON.", json_schema_extra={"free": True, "flags": ["--json"]}
    )

    @field_validator("loss_fn")
    @classmethod
    def _known_losses(cls, value: str) -> str:
        unknown = set(_weights(value)) - set(_LOSSES)
        if unknown:
            raise ValueError(f"unknown loss {sorted(unknown)[0]!r}; known losses are {', '.join(_LOSSES)}")
        return value

    @field_validator("tracker")
    @classmethod
    def _known_trackers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name not in TRACKERS]
        if unknown:
            raise ValueError(f"unknown tracker {unknown[0]!r}; known trackers are {', '.join(TRACKERS)}")
        return value

    @model_serializer(mode="wrap")
    def _own_options_only(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A saved run names no option of another algorithm, so that it can be given as `--config`."""
        return {name: value for name, value in dump(self).items() if self._applies(name) and self._decides(name)}

    def check(self) -> None:
        """Raises UserError for an unknown algorithm, an option of one algorithm given for another, options of
        hidden states that contradict each other, or a tracker that is not installed."""
        lookup(self.speculator_type)
        check_installed(self.tracker)
        self._check_states()
        for name in sorted(self.model_fields_set):
            if getattr(self, name) is not None and not self._applies(name):
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: an option of {_extra(name)['only']}, which "
                    f"{self.speculator_type} does not have; leave it out."
                )

    @property
    def missing_policy(self) -> Literal["generate", "skip", "raise"]:
        """`on_missing`, resolved."""
        return self.on_missing or ("generate" if self.vllm_endpoint else "raise")

    def _check_states(self) -> None:
        problem = None
        if not self.hidden_states and (not self.vllm_endpoint or self.missing_policy == "raise"):
            problem = "--hidden-states is missing: give a cache made by `speculators extract`, or --vllm-endpoint"
        elif self.missing_policy == "generate" and not self.vllm_endpoint:
            problem = "--on-missing generate needs a server to generate with; give --vllm-endpoint"
        elif self.on_generate == "cache" and not (self.hidden_states and self.vllm_endpoint):
            problem = "--on-generate cache needs --hidden-states, the cache to fill, and --vllm-endpoint"
        elif "auto" in self.vllm_endpoint and len(self.vllm_endpoint) > 1:
            problem = "--vllm-endpoint auto starts the only server of the run; give auto alone, or URLs"
        elif self.vllm_endpoint and "auto" not in self.vllm_endpoint and not self.storage_path:
            problem = "--vllm-endpoint needs --storage-path, the directory that its servers write to"
        if problem:
            raise UserError(f"{problem}.")

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share with the run that it continues, as JSON values."""
        dumped = self.model_dump(mode="json")
        return {name: value for name, value in dumped.items() if not _extra(name).get("free")}

    def loss_mix(self) -> dict[str, float]:
        """Weight of each loss in the sum."""
        return dict.fromkeys(_LOSSES, 0.0) | _weights(self.loss_fn)

    def decay_gamma(self, block_size: int) -> float:
        """Slots over which a slot's weight falls by e: as asked for, or the DFlash paper's value for the block size
        (arXiv 2602.06036: 4, 5, 7 for 8, 10, 16), half the block for sizes it doesn't name."""
        return self.loss_decay_gamma or _GAMMA_BY_BLOCK.get(block_size, block_size / 2)

    def _decides(self, name: str) -> bool:
        """Whether the option, and not the draft of `--from-pretrained`, says it."""
        left_out = name not in self.model_fields_set
        return not (self.from_pretrained and left_out and (_is_structure(name) or name == "ttt_steps"))

    def _applies(self, name: str) -> bool:
        return _extra(name).get("only", self.speculator_type) == self.speculator_type


def structural(config: DraftConfig) -> list[str]:
    """Names of the options that are fields of this kind of draft and decide its tensors."""
    return [name for name in type(config).model_fields if name in TrainOptions.model_fields and _is_structure(name)]


def _is_structure(name: str) -> bool:
    return bool(_extra(name).get("structure"))


def _extra(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], TrainOptions.model_fields[name].json_schema_extra or {})


def _weights(loss_fn: str) -> dict[str, float]:
    if not loss_fn.lstrip().startswith("{"):
        return {loss_fn: 1.0}
    try:
        return {str(name): float(weight) for name, weight in json.loads(loss_fn).items()}
    except (json.JSONDecodeError, TypeError, ValueError):
        raise ValueError("not a loss's name nor a JSON object of weights") from None

"""Options and result of `speculators extract`; apart from the work, so that showing them needs no torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from speculators.errors import UserError
from speculators.schema import Strict
from speculators.verifier import Verifier


class ExtractOptions(Strict):
    """Fill a cache with the verifier's hidden states, through vLLM or in process. Started again, it continues."""

    verifier: str = Field(description="Hugging Face directory of the verifier.")
    data: Path = Field(description="Data directory that `speculators prepare` wrote.")
    output: Path = Field(description="Cache directory to fill.")
    aux_layer_ids: tuple[int, ...] = Field(
        (),
        description="Layers whose input streams feed the draft, ascending; default: early, middle and late.",
    )
    source: Literal["vllm", "local"] = Field(
        "vllm", description="vllm: a server that is started and ended; local: transformers in this process."
    )
    endpoint: str | None = Field(None, description="URL of a running extraction server; needs --storage-path.")
    storage_path: Path | None = Field(
        None, description="Where the extraction server writes its files; by default under /dev/shm, removed at the end."
    )
    concurrency: int = Field(32, ge=1, description="Requests in flight; more of them fill vLLM's batches better.")
    eager: bool = Field(True, description="--no-eager: vLLM compiles first, minutes that pay for large data only.")
    tensor_parallel_size: int | None = Field(
        None, ge=1, description="Devices for the server.", json_schema_extra={"flags": ["-tp"]}
    )
    vllm: str | None = Field(None, description="vLLM to start: a virtual environment, a Python, or a vllm executable.")
    json_output: bool = Field(
        False, description="Print the summary as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )

    @model_validator(mode="after")
    def _check(self) -> "ExtractOptions":
        if self.endpoint and not self.storage_path:
            raise ValueError("--endpoint needs --storage-path, the directory that its server writes to")
        if self.endpoint and self.source == "local":
            raise ValueError("--endpoint and --source local exclude each other")
        return self


class ExtractSummary(Strict):
    """What an extraction did. Sizes in bytes, times in seconds."""

    output: str
    aux_layer_ids: tuple[int, ...]
    samples: int
    extracted: int
    tokens: int
    seconds: float
    tokens_per_s: float
    size_bytes: int


def check_layer_ids(aux_layer_ids: tuple[int, ...], verifier: Verifier) -> None:
    """vLLM returns the streams in layer order whatever order was asked for, so only ascending ids are taken.

    Raises:
        UserError: no ids, or ids that are out of range, repeated or not ascending.
    """
    ascending = list(aux_layer_ids) == sorted(set(aux_layer_ids))
    if not aux_layer_ids or not ascending or aux_layer_ids[0] < 0 or aux_layer_ids[-1] >= verifier.num_layers:
        raise UserError(
            f"--aux-layer-ids: {','.join(map(str, aux_layer_ids))} is not allowed; give ascending ids from 0 to "
            f"{verifier.num_layers - 1} (id k is the stream entering layer k; the last stream is always stored)."
        )

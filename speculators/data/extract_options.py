"""Options and result of `speculators extract`; apart from the work, so that showing them needs no torch."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from speculators.data.cache_manifest import Store
from speculators.errors import UserError
from speculators.schema import Strict
from speculators.verifier import Verifier

LEAST_COSINE = 0.98
"""Least cosine of a token's stored and recomputed streams. Seen on SmolLM2-135M: bfloat16 against float32 0.9993,
rounding to fp8 0.9995, vLLM against transformers 0.988; but 0.93 at most between the streams of neighbouring layers."""


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
    store: Store = Field(
        "bf16", description="fp8: half the disk, every value rounded to 8 bits with a scale a token and layer."
    )
    shard: str = Field("1/1", description="I/N: only the I-th of N parts of the samples (I from 1 to N).")
    endpoint: tuple[str, ...] = Field(
        (), description="URLs of running extraction servers, kept equally busy; needs --storage-path."
    )
    storage_path: Path | None = Field(
        None,
        description="Where the extraction servers write their files; by default under /dev/shm, removed at the end.",
    )
    concurrency: int = Field(
        32, ge=1, description="Requests in flight at each server; more of them fill vLLM's batches better."
    )
    request_timeout: float = Field(
        600.0, gt=0, description="Seconds for a request, and to wait for servers that are not up."
    )
    max_consecutive_failures: int = Field(
        10, ge=1, description="Failed requests in a row for one sample that end the extraction."
    )
    verify: int | None = Field(
        None,
        ge=1,
        description="At the end compute this many samples again with transformers, some from each server, and compare; "
        "exit 1 if they differ.",
    )
    eager: bool = Field(True, description="--no-eager: vLLM compiles first, minutes that pay for large data only.")
    tensor_parallel_size: int | None = Field(
        None, ge=1, description="Devices for the server.", json_schema_extra={"flags": ["-tp"]}
    )
    vllm: str | None = Field(None, description="vLLM to start: a virtual environment, a Python, or a vllm executable.")
    json_output: bool = Field(
        False, description="Print the summary as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )

    @field_validator("shard")
    @classmethod
    def _one_of_several(cls, value: str) -> str:
        part = re.fullmatch(r"(\d+)/(\d+)", value)
        if part is None or not 1 <= int(part[1]) <= int(part[2]):
            raise ValueError("not a part of a whole; give I/N with I from 1 to N, as in 2/4")
        return value

    @model_validator(mode="after")
    def _check(self) -> "ExtractOptions":
        if self.endpoint and not self.storage_path:
            raise ValueError("--endpoint needs --storage-path, the directory that its server writes to")
        if self.endpoint and self.source == "local":
            raise ValueError("--endpoint and --source local exclude each other")
        return self

    @property
    def parts(self) -> int:
        """N of the shard I/N."""
        return int(self.shard.partition("/")[2])

    def takes(self, sample_id: str) -> bool:
        """Whether a sample is in this shard: its id, a hash, modulo N. The same everywhere, whatever else is there."""
        return int(sample_id, 16) % self.parts == int(self.shard.partition("/")[0]) - 1

    def file(self, name: str) -> Path:
        """A file of this extraction in the output directory, which shards may share: `vllm-2-of-4.log`."""
        path = self.output / name
        return path if self.parts == 1 else path.with_stem(f"{path.stem}-{self.shard.replace('/', '-of-')}")


class LayerAgreement(Strict):
    """How far stored states of one layer are from computed ones.

    Attributes:
        layer: the layer's id, or "last".
        lowest_cosine: of any token.
        mean_cosine: over all tokens.
        largest_relative_error: of any token; its largest difference over its largest value.
    """

    layer: str
    lowest_cosine: float
    mean_cosine: float
    largest_relative_error: float


class Verification(Strict):
    """What `--verify` found; `differing` names the samples that are not close enough, with the server of each."""

    samples: int
    tokens: int
    least_cosine_allowed: float = LEAST_COSINE
    layers: tuple[LayerAgreement, ...]
    differing: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every token of every layer is close enough."""
        return all(layer.lowest_cosine >= self.least_cosine_allowed for layer in self.layers)


class ExtractSummary(Strict):
    """What an extraction did. Sizes in bytes, times in seconds; with a shard, counts of the shard."""

    output: str
    aux_layer_ids: tuple[int, ...]
    samples: int
    extracted: int
    tokens: int
    seconds: float
    tokens_per_s: float
    size_bytes: int
    verification: Verification | None = None


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

"""An FP8 copy of a verifier, by blocks (fast on GPUs and on CPUs with AMX) or by channels (GPUs; a CPU crawls).

The trap: vLLM takes every linear layer for quantised that `config.json` doesn't except, so the layers that keep their
weights are named there.
"""

import os
import shutil
import uuid
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from serve.fp8 import INDEX, weight_file_bytes, write_weights
from serve.program import find
from speculators.errors import UserError
from speculators.provenance import processor_flags
from speculators.schema import Strict, read_json, read_json_dict, write_json
from speculators.verifier import Verifier

FORMAT_FILE = "quantization.json"
BLOCK = (64, 128)


class QuantizeOptions(Strict):
    """Write an FP8 copy of a verifier, which vLLM serves in its place."""

    verifier: str = Field(
        description="Hugging Face directory of the verifier, in bfloat16.", json_schema_extra={"argument": True}
    )
    output: Path = Field(description="Directory to write.")
    scheme: Literal["block", "channel"] = Field(
        "block",
        description="A scale for each block (GPU, and CPU with AMX), or for each row, with activations quantised token "
        "by token (compressed-tensors FP8-dynamic; GPU only).",
    )
    block: tuple[int, ...] = Field(
        (), description="With --scheme block: rows and columns that share one scale; default: 64 128."
    )
    json_output: bool = Field(
        False, description="Print the result as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )

    def scaled_together(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None for a scale for each row.

        Raises:
            UserError: a block with another scheme, or one that is not two numbers above zero.
        """
        if self.scheme == "channel":
            if self.block:
                raise UserError("--block: only with --scheme block; leave it out, each row gets one scale.")
            return None
        rows_and_columns = self.block or BLOCK
        if len(rows_and_columns) != 2 or min(rows_and_columns) < 1:
            raise UserError(f"--block: {list(self.block)} is not a block; give rows and columns, such as 64 128.")
        return rows_and_columns[0], rows_and_columns[1]


class Quantization(Strict):
    """What an FP8 copy is a copy of, and how far from it.

    Attributes:
        block: rows and columns that share a scale; None for a scale for each row.
        relative_error: kind of layer -> |w - q(w)| / |w| (Frobenius norms over all layers).
        size_bytes: of the weight files; `source_size_bytes` of the verifier's.
    """

    source: str
    source_revision: str
    block: tuple[int, int] | None
    relative_error: dict[str, float]
    size_bytes: int
    source_size_bytes: int


def fp8_unsupported_reason(vllm: str | None = None) -> str | None:
    """Why this machine's vLLM (see `serve.program.find`) cannot serve block FP8 at speed; None when it can.

    Raises:
        UserError: there is no vLLM.
    """
    if find(vllm).is_cpu and "amx_tile" not in processor_flags():
        return "this processor has no AMX (no amx_tile in /proc/cpuinfo), without which vLLM has no fast FP8 on a CPU"
    return None


def quantize_fp8(verifier: Path, output: Path, block: tuple[int, int] | None = BLOCK) -> Quantization:
    """Write the copy, shard by shard and atomically as a whole; one that is there already is kept.

    Args:
        block: rows and columns that share a scale; None gives each row one.

    Raises:
        UserError: no such verifier, one that is quantised already, rows that don't divide by the block, or an output
            directory that holds something else.
    """
    facts = Verifier.read(verifier)
    if (output / FORMAT_FILE).exists():
        done = read_json(output / FORMAT_FILE, Quantization, "a record of quantisation")
        if (done.source_revision, done.block) == (facts.revision, block):
            return done
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} holds something else; name a new directory or remove it.")
    config = read_json_dict(verifier / "config.json", "a Hugging Face model config")
    if "quantization_config" in config:
        raise UserError(f"--verifier: {verifier} is quantised already; give the bfloat16 original.")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir()
        errors, kept = write_weights(verifier, temporary, block)
        made = Quantization(
            source=facts.path,
            source_revision=facts.revision,
            block=block,
            relative_error=errors,
            size_bytes=weight_file_bytes(temporary),
            source_size_bytes=weight_file_bytes(verifier),
        )
        _copy_rest(verifier, temporary)
        write_json(temporary / "config.json", {**config, "quantization_config": _quantization_config(block, kept)})
        write_json(temporary / FORMAT_FILE, made)
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def _quantization_config(block: tuple[int, int] | None, kept: tuple[str, ...]) -> dict[str, Any]:
    if block:
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
            "modules_to_not_convert": list(kept),
        }
    one = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**one, "strategy": "channel", "dynamic": False},
        "input_activations": {**one, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
    }


def _copy_rest(verifier: Path, output: Path) -> None:
    """Tokenizer, template and generation config; weights, their index and config.json are written anew."""
    for file in verifier.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin") and file.name not in ("config.json", INDEX):
            shutil.copyfile(file, output / file.name)

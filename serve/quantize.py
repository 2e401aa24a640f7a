"""A block-FP8 copy of a verifier: the one FP8 form that is fast on CPUs with AMX (weights only, activations bfloat16).

Each `*_proj.weight` becomes float8_e4m3fn with one float32 scale a block, `weight_scale_inv` [ceil(N/b0), ceil(K/b1)],
w ~ q * scale_inv (vllm/model_executor/layers/quantization/fp8.py). Rows must divide by b0, columns need not by b1.
"""

import os
import re
import shutil
import uuid
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from serve.program import find
from speculators.errors import UserError
from speculators.provenance import processor_flags
from speculators.schema import Strict, read_json, read_json_dict, write_json
from speculators.verifier import Verifier

if TYPE_CHECKING:
    import torch

FORMAT_FILE = "quantization.json"
BLOCK = (64, 128)
_QUANTISED = re.compile(r"\.layers\.\d+\..*?(\w+_proj)\.weight$")
_FP8_MAX = 448.0  # largest finite float8_e4m3fn
_INDEX = "model.safetensors.index.json"


class QuantizeOptions(Strict):
    """Write a block-FP8 copy of a verifier, which vLLM serves in its place."""

    verifier: str = Field(
        description="Hugging Face directory of the verifier, in bfloat16.", json_schema_extra={"argument": True}
    )
    output: Path = Field(description="Directory to write.")
    block: tuple[int, ...] = Field(
        BLOCK, description="Rows and columns that share one scale.", min_length=2, max_length=2
    )
    json_output: bool = Field(
        False, description="Print the result as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )


class Quantization(Strict):
    """What an FP8 copy is a copy of, and how far from it.

    Attributes:
        relative_error: kind of layer -> |w - q(w)| / |w| (Frobenius norms over all layers).
        size_bytes: of the weight files; `source_size_bytes` of the verifier's.
    """

    source: str
    source_revision: str
    block: tuple[int, int]
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


def quantize_fp8(verifier: Path, output: Path, block: tuple[int, int] = BLOCK) -> Quantization:
    """Write the copy, shard by shard and atomically as a whole; one that is there already is kept.

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
        errors = _write_weights(verifier, temporary, block)
        made = Quantization(
            source=facts.path,
            source_revision=facts.revision,
            block=block,
            relative_error=errors,
            size_bytes=_weight_bytes(temporary),
            source_size_bytes=_weight_bytes(verifier),
        )
        _copy_rest(verifier, temporary)
        write_json(temporary / "config.json", {**config, "quantization_config": _quantization_config(block)})
        write_json(temporary / FORMAT_FILE, made)
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def quantize_blocks(weight: "torch.Tensor", block: tuple[int, int]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Quantise a matrix by blocks.

    Args:
        weight: [N, K].
        block: rows and columns of a block; the last blocks may be smaller.

    Returns:
        float8_e4m3fn [N, K] and float32 scales [ceil(N/b0), ceil(K/b1)], weight ~ first * scale of its block.
    """
    import torch

    (N, K), (b0, b1) = weight.shape, block
    padded = torch.zeros(-(-N // b0) * b0, -(-K // b1) * b1)
    padded[:N, :K] = weight
    blocks = padded.view(padded.shape[0] // b0, b0, padded.shape[1] // b1, b1)
    scales = (blocks.abs().amax(dim=(1, 3)) / _FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    quantised = (blocks / scales[:, None, :, None]).view_as(padded)[:N, :K]
    return quantised.to(torch.float8_e4m3fn).contiguous(), scales


def dequantize_blocks(quantised: "torch.Tensor", scales: "torch.Tensor", block: tuple[int, int]) -> "torch.Tensor":
    """The inverse of `quantize_blocks`: float32 [N, K]."""
    N, K = quantised.shape
    spread = scales.repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
    return quantised.float() * spread


def _write_weights(verifier: Path, output: Path, block: tuple[int, int]) -> dict[str, float]:
    """Quantise file by file; gives the relative error of each kind of layer."""
    from safetensors.torch import load_file, save_file

    lost: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    weight_map: dict[str, str] = {}
    files = sorted(verifier.glob("*.safetensors"))
    if not files:
        raise UserError(f"--verifier: {verifier} has no safetensors weights.")
    for file in files:
        tensors: dict[str, Any] = {}
        for name, tensor in load_file(file).items():
            kind = _QUANTISED.search(name)
            if kind is None or tensor.ndim != 2:
                tensors[name] = tensor
                continue
            if tensor.shape[0] % block[0]:
                raise UserError(
                    f"--block: {name} has {tensor.shape[0]} rows, which don't divide by {block[0]}; use smaller blocks."
                )
            quantised, scales = quantize_blocks(tensor.float(), block)
            tensors |= {name: quantised, f"{name}_scale_inv": scales}
            lost[kind[1]] += float((tensor.float() - dequantize_blocks(quantised, scales, block)).square().sum())
            total[kind[1]] += float(tensor.float().square().sum())
        save_file(tensors, output / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    if len(files) > 1:
        write_json(output / _INDEX, {"metadata": {"total_size": _weight_bytes(output)}, "weight_map": weight_map})
    return {kind: (lost[kind] / total[kind]) ** 0.5 for kind in sorted(total)}


def _quantization_config(block: tuple[int, int]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
    }


def _copy_rest(verifier: Path, output: Path) -> None:
    """Tokenizer, template and generation config; weights, their index and config.json are written anew."""
    for file in verifier.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin") and file.name not in ("config.json", _INDEX):
            shutil.copyfile(file, output / file.name)


def _weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))

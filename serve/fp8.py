"""Weights in FP8: each `*_proj.weight` [N, K] becomes float8_e4m3fn with float32 scales, all others stay as they are.

By blocks: `weight_scale_inv` [ceil(N/b0), ceil(K/b1)], w ~ q * scale_inv (vLLM's layers/quantization/fp8.py); rows must
divide by b0, columns need not by b1. By channels: `weight_scale` [N, 1], as compressed-tensors has it.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators.errors import UserError
from speculators.schema import write_json

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
_QUANTISED = re.compile(r"\.layers\.\d+\..*?(\w+_proj)\.weight$")
_FP8_MAX = 448.0  # largest finite float8_e4m3fn


def write_weights(
    verifier: Path, output: Path, block: tuple[int, int] | None
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Quantise file by file.

    Returns:
        The relative error of each kind of layer, and the linear layers that keep their weights.

    Raises:
        UserError: there is nothing to quantise, rows don't divide by the block, or experts lie in one tensor.
    """
    from safetensors.torch import load_file, save_file

    lost: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    weight_map: dict[str, str] = {}
    kept = {"lm_head"}
    files = sorted(verifier.glob("*.safetensors"))
    if not files:
        raise UserError(f"--verifier: {verifier} has no safetensors weights.")
    for file in files:
        tensors: dict[str, Any] = {}
        for name, tensor in load_file(file).items():
            kind = _QUANTISED.search(name)
            if kind is None or tensor.ndim != 2:
                _check_kept(name, tensor.ndim)
                if tensor.ndim == 2 and name.endswith(".weight") and "embed" not in name:
                    kept.add(name.removesuffix(".weight"))
                tensors[name] = tensor
                continue
            if block and tensor.shape[0] % block[0]:
                raise UserError(
                    f"--block: {name} has {tensor.shape[0]} rows, which don't divide by {block[0]}; use smaller blocks."
                )
            scaled_together = block or (1, tensor.shape[1])
            quantised, scales = quantize_blocks(tensor.float(), scaled_together)
            tensors |= {name: quantised, f"{name}_scale_inv" if block else f"{name}_scale": scales}
            restored = dequantize_blocks(quantised, scales, scaled_together)
            lost[kind[1]] += float((tensor.float() - restored).square().sum())
            total[kind[1]] += float(tensor.float().square().sum())
        save_file(tensors, output / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    if not total:
        raise UserError(f"--verifier: {verifier} has no projections to quantise (model.layers.N..._proj.weight).")
    if len(files) > 1:
        write_json(output / INDEX, {"metadata": {"total_size": weight_file_bytes(output)}, "weight_map": weight_map})
    return {kind: (lost[kind] / total[kind]) ** 0.5 for kind in sorted(total)}, tuple(sorted(kept))


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


def weight_file_bytes(directory: Path) -> int:
    """Size of the weight files on disk."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _check_kept(name: str, num_dimensions: int) -> None:
    """vLLM takes all experts for quantised when a layer is."""
    if num_dimensions == 3 and ".experts." in name:
        raise UserError(
            f"--verifier: {name} holds all experts of a layer in one tensor, which is not supported here; use a copy "
            "that its makers quantised."
        )

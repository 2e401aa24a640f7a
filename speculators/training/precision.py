"""When matrix products run in bf16. Weights, gradients and optimizer state are float32 in every case."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

from speculators.provenance import processor_flags

# What bf16 products need on a processor; without them bf16 is emulated and slower than float32.
_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})


def uses_bf16(precision: Literal["auto", "bf16", "float32"], device: torch.device) -> bool:
    """Whether products run in bf16 on this device."""
    if precision == "auto":
        return device.type == "cuda" or bool(_BF16_FLAGS & processor_flags())
    return precision == "bf16"


def products(precision: Literal["auto", "bf16", "float32"], device: torch.device) -> AbstractContextManager[None]:
    """The context for a forward pass."""
    context: AbstractContextManager[None] = torch.autocast(
        device.type, torch.bfloat16, enabled=uses_bf16(precision, device)
    )
    return context

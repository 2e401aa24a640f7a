"""Hidden states in half the space: float8_e4m3fn with one float32 scale a token and stream.

The trap: without its scale a stored value means nothing, so the tensors have names of their own (`NAME_fp8`,
`NAME_scale`): a reader that knows only bfloat16 finds no tensor instead of a wrong one.
"""

from typing import NamedTuple

import torch

LARGEST = 448.0
"""Largest finite value of float8_e4m3fn."""


class Quantised(NamedTuple):
    """`values[..., h] * scale[...]` is the stream.

    Attributes:
        values: float8_e4m3fn [..., H]; the largest of a token is 448 in size.
        scale: float32 [...].
    """

    values: torch.Tensor
    scale: torch.Tensor


def quantise(stream: torch.Tensor) -> Quantised:
    """Round finite values [..., H], each token scaled to fill the format's range.

    An element's error is at most 1/28 of its token's largest value (half a step of 32 at 448) and at most 1/16 of
    itself, down to 2^-6 / 448 of that largest value; below, at most 2^-10 / 448 of the latter.
    """
    stream = stream.float()
    largest = stream.abs().amax(dim=-1)
    scale = largest / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    values = (stream / scale[..., None]).clamp_(-LARGEST, LARGEST)  # beyond the range a cast would give NaN
    return Quantised(values.to(torch.float8_e4m3fn), scale)


def dequantise(stored: Quantised) -> torch.Tensor:
    """The stream again, bfloat16 [..., H].

    Raises:
        ValueError: there is not one scale a token.
    """
    if stored.scale.shape != stored.values.shape[:-1]:
        raise ValueError(f"scales of shape {list(stored.scale.shape)} for values of {list(stored.values.shape)}")
    return stored.values.float().mul_(stored.scale[..., None]).bfloat16()

"""One sample's hidden states, what makes them acceptable, and the tensors that they become in a file.

The names of the tensors differ between the ways of storing, see `stored_fp8`.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from speculators.data.stored_fp8 import Quantised, dequantise, quantise
from speculators.errors import UserError


class HiddenStates(NamedTuple):
    """One sample's streams, bfloat16.

    Attributes:
        ids: int32 [T], the tokens that the verifier saw.
        aux_hidden: [T, A, H], the streams *entering* layers `aux_layer_ids` (Hugging Face `hidden_states[k]`).
        last_hidden: [T, H], the last residual stream *before* the final norm.
    """

    ids: torch.Tensor
    aux_hidden: torch.Tensor
    last_hidden: torch.Tensor


Fetch = Callable[[str, np.ndarray], HiddenStates]
"""(sample id, int32 [T] token ids) -> that sample's states."""


def check_states(states: HiddenStates, num_aux: int, hidden_size: int, where: str) -> None:
    """Raises UserError unless shapes fit and every value is finite."""
    length = len(states.ids)
    wanted = ((length, num_aux, hidden_size), (length, hidden_size))
    seen = (tuple(states.aux_hidden.shape), tuple(states.last_hidden.shape))
    if seen != wanted:
        raise UserError(
            f"{where}: hidden states of shape {seen[0]} and {seen[1]}, expected {wanted[0]} and {wanted[1]}."
        )
    for name, tensor in (("aux_hidden", states.aux_hidden), ("last_hidden", states.last_hidden)):
        if not torch.isfinite(tensor.float().sum()) and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0])
            raise UserError(f"{where}: {name} is not finite (first at token {bad}); delete it and extract again.")


def to_tensors(states: HiddenStates, dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, by the names that they have there."""
    if dtype == "bfloat16":
        return {name: tensor.contiguous() for name, tensor in states._asdict().items()}
    aux, last = quantise(states.aux_hidden), quantise(states.last_hidden)
    return {
        "ids": states.ids.contiguous(),
        "aux_hidden_fp8": aux.values,
        "aux_hidden_scale": aux.scale,
        "last_hidden_fp8": last.values,
        "last_hidden_scale": last.scale,
    }


def from_tensors(tensors: dict[str, torch.Tensor], dtype: str) -> HiddenStates:
    """The states in a file. Raises KeyError when it is of another kind, ValueError when a scale does not fit."""
    if dtype == "bfloat16":
        return HiddenStates(tensors["ids"], tensors["aux_hidden"], tensors["last_hidden"])
    aux = Quantised(tensors["aux_hidden_fp8"], tensors["aux_hidden_scale"])
    last = Quantised(tensors["last_hidden_fp8"], tensors["last_hidden_scale"])
    return HiddenStates(tensors["ids"], dequantise(aux), dequantise(last))

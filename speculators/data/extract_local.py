"""Hidden states from transformers in this process, for machines without vLLM: bfloat16, one sample at a time.

The trap: transformers' last hidden state is behind the final norm; ours is taken in front of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from speculators.data.hidden_states import HiddenStates
from speculators.errors import UserError
from speculators.verifier import Verifier


class LocalSource:
    """The verifier's decoder, loaded once. Call it from one thread."""

    def __init__(self, verifier: Verifier, aux_layer_ids: tuple[int, ...]) -> None:
        from transformers import AutoModelForCausalLM

        self.aux_layer_ids = aux_layer_ids
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        with _memory_for(verifier.path):
            model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.bfloat16).to(self.device).eval()
        self._decoder = model.get_decoder()
        norm = getattr(self._decoder, "norm", None)
        if norm is None:
            raise UserError(
                f"--source local: {verifier.path} ({verifier.model_type}) has no final norm where it is looked for."
            )
        self._last: torch.Tensor | None = None
        norm.register_forward_pre_hook(self._keep)

    def _keep(self, _norm: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._last = inputs[0]

    @torch.inference_mode()
    def __call__(self, sample_id: str, ids: np.ndarray) -> HiddenStates:
        """The states of `ids`, int32 [T], on the CPU."""
        tokens = torch.from_numpy(np.array(ids)).long().to(self.device)
        states = self._decoder(tokens[None], use_cache=False, output_hidden_states=True).hidden_states
        assert self._last is not None
        aux = torch.stack([states[k][0] for k in self.aux_layer_ids], dim=1)
        return HiddenStates(tokens.int().cpu(), aux.cpu(), self._last[0].cpu())


@contextmanager
def _memory_for(verifier: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            f"--verifier: {verifier} does not fit into the free memory of the GPU; end what else runs there, or hide "
            "the GPU (CUDA_VISIBLE_DEVICES=) to compute on the CPU."
        ) from None

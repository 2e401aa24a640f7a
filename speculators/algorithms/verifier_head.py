"""The frozen ends of the verifier: embedding, final norm and the output rows of the draft vocabulary.

They stay outside the trained module and are read tensor by tensor, so the verifier's layers are never loaded. The trap:
the last hidden state in the cache is *before* the final norm, whose kind (w or 1 + w) differs between families.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from speculators.errors import UserError
from speculators.verifier import Verifier

_EMBEDDING = "embed_tokens.weight"
_NORM = "norm.weight"
_HEAD = "lm_head.weight"


class VerifierHead:
    """Embedding [V, H], final norm [H], and output rows [D, H] of the draft vocabulary; bfloat16, frozen.

    Args:
        verifier: whose weights to read.
        draft_token_ids: int64 [D], verifier ids of the draft vocabulary, ascending.
        dtype: what the matrix products run in.
    """

    def __init__(self, verifier: Verifier, draft_token_ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        found = _read(Path(verifier.path), verifier.tied)
        self.embedding_VH = found[_EMBEDDING].to(dtype)
        weight = found[_NORM].float()
        self._norm_weight = weight + 1 if verifier.norm_kind == "one_plus" else weight
        head = self.embedding_VH if verifier.tied else found[_HEAD].to(dtype)
        self.output_DH = head if len(draft_token_ids) == len(head) else head[draft_token_ids].contiguous()
        self._eps = verifier.rms_norm_eps
        self._softcap = verifier.final_softcap
        self._scale = verifier.logit_scale

    def to(self, device: torch.device) -> "VerifierHead":
        """Move the frozen weights."""
        self.embedding_VH, self.output_DH = self.embedding_VH.to(device), self.output_DH.to(device)
        self._norm_weight = self._norm_weight.to(device)
        return self

    def embed(self, ids: Tensor) -> Tensor:
        """[..., H], in the weights' dtype."""
        return F.embedding(ids, self.embedding_VH)

    def normalize(self, last_hidden_XH: Tensor) -> Tensor:
        """The verifier's final norm of pre-norm states, in the weights' dtype."""
        normed = F.rms_norm(last_hidden_XH.float(), last_hidden_XH.shape[-1:], self._norm_weight, self._eps)
        return normed.to(self.output_DH.dtype)

    @property
    def plain_logits(self) -> bool:
        """Whether the verifier's logits are those of its output rows as they are."""
        return self._scale == 1.0 and not self._softcap

    def verifier_logits(self, normed_XH: Tensor) -> Tensor:
        """The verifier's own logits [X, D] over the draft vocabulary, scale and soft-cap applied, float32."""
        logits = F.linear(normed_XH, self.output_DH).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits


def _read(directory: Path, tied: bool) -> dict[str, Tensor]:
    """The end tensors by their bare names, whatever prefix the family puts in front."""
    wanted = {_EMBEDDING, _NORM} | (set() if tied else {_HEAD})
    biases = {"norm.bias", "lm_head.bias"}
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
                if bare in biases:
                    raise UserError(
                        f"--verifier: {file} has the tensor {name}, which changes the logits in a way not known here, "
                        "and a draft would learn wrong targets; give a verifier without it."
                    )
                if bare in wanted:
                    found[bare] = weights.get_tensor(name)
    missing = wanted - set(found)
    if missing:
        raise UserError(f"--verifier: {directory} has no tensor {min(missing)} in its *.safetensors files.")
    return found

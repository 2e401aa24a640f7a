"""What a draft embeds with and predicts with: the verifier's own rows, or frozen rows of its own.

Drafts trained elsewhere may ship an embedding or output rows that differ from the verifier's; vLLM serves those, so
training and prediction use them too. The verifier's distribution still comes from the verifier's rows.
"""

import torch
from torch import Tensor

from speculators.algorithms.verifier_head import VerifierHead

EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"


class OwnEnds(VerifierHead):
    """A verifier head whose embedding [V, H] or draft output rows [D, H] are the draft's own.

    Args:
        head: the verifier's.
        tensors: any of `EMBEDDING` and `OUTPUT`.
    """

    def __init__(self, head: VerifierHead, tensors: dict[str, Tensor]) -> None:
        self._head = head
        self.own = tuple(tensors)
        self.embedding_VH = tensors[EMBEDDING].to(head.embedding_VH) if EMBEDDING in tensors else head.embedding_VH
        self.output_DH = tensors[OUTPUT].to(head.output_DH) if OUTPUT in tensors else head.output_DH

    def to(self, device: torch.device) -> "OwnEnds":
        """Move the draft's rows; the verifier's are moved with its own head."""
        self.embedding_VH, self.output_DH = self.embedding_VH.to(device), self.output_DH.to(device)
        return self

    def normalize(self, last_hidden_XH: Tensor) -> Tensor:
        """As the verifier."""
        return self._head.normalize(last_hidden_XH)

    @property
    def plain_logits(self) -> bool:
        """As the verifier, as long as its output rows are used."""
        return self.output_DH is self._head.output_DH and self._head.plain_logits

    def verifier_logits(self, normed_XH: Tensor) -> Tensor:
        """As the verifier."""
        return self._head.verifier_logits(normed_XH)


def differing(tensors: dict[str, Tensor], head: VerifierHead) -> dict[str, Tensor]:
    """Those of a checkpoint's end tensors that are not the verifier's rows, as rounded in `head`."""
    verifiers = {EMBEDDING: head.embedding_VH, OUTPUT: head.output_DH}
    return {
        name: tensors[name]
        for name, rows in verifiers.items()
        if name in tensors and not torch.equal(tensors[name].to(rows), rows)
    }

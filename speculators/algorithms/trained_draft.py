"""What drafts in training share: the frozen verifier ends, the vocabulary map, and the tensors of a checkpoint."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from speculators.algorithms.draft_config import DraftConfig
from speculators.algorithms.draft_ends import EMBEDDING, OUTPUT, OwnEnds, differing
from speculators.algorithms.losses import LossMix
from speculators.algorithms.verifier_head import VerifierHead
from speculators.errors import UserError

if TYPE_CHECKING:
    from speculators.data.vocab import VocabMap
    from speculators.training.options import TrainOptions
    from speculators.verifier import Verifier


class TrainedDraft:
    """A module plus the frozen parts that it is trained and served with.

    Attributes:
        head: the verifier's ends, which give the targets.
        ends: what the draft embeds and predicts with; `head` itself unless a checkpoint brought rows of its own.
    """

    def __init__(
        self, config: DraftConfig, module: nn.Module, verifier: "Verifier", vocab: "VocabMap", options: "TrainOptions"
    ) -> None:
        self.config = config
        self.module = module
        self.vocab = vocab
        self.options = options
        self.mix = LossMix(**options.loss_mix())
        self.draft_token_ids = torch.from_numpy(vocab.t2d.nonzero()[0])
        self.head = VerifierHead(verifier, self.draft_token_ids)
        self.ends = self.head

    def to(self, device: torch.device) -> None:
        """Move the module and the frozen parts."""
        self.module.to(device)
        self.head.to(device)
        self.ends.to(device)
        self.draft_token_ids = self.draft_token_ids.to(device)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Trained weights by their names on disk, and the frozen tensors that this kind of draft ships."""
        tensors = dict(self.module.state_dict())
        frozen = {
            EMBEDDING: self.ends.embedding_VH,
            OUTPUT: self.ends.output_DH,
            "d2t": torch.from_numpy(self.vocab.d2t),
            "t2d": torch.from_numpy(self.vocab.t2d),
        }
        own = self.ends.own if isinstance(self.ends, OwnEnds) else ()
        names = dict.fromkeys([*self.config.tensor_shapes(), *own])
        return {name: tensors[name] if name in tensors else frozen[name] for name in names}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Set the trained weights. Embedding and output rows that are not the verifier's stay the draft's own, frozen.

        Raises:
            UserError: the checkpoint was trained with another draft vocabulary.
        """
        if "t2d" in tensors and not torch.equal(tensors["t2d"], torch.from_numpy(self.vocab.t2d)):
            raise UserError(
                "the checkpoint's draft vocabulary (t2d) is not this run's; use the data it was trained on."
            )
        own = differing(tensors, self.head)
        self.ends = OwnEnds(self.head, own) if own else self.head
        self.module.load_state_dict({name: tensors[name].float() for name in self.module.state_dict()})

    @staticmethod
    def histogram_of(correct_XK: Tensor, real_XK: Tensor) -> Tensor:
        """int64 [K + 1]: drafts by accepted tokens, over the drafts whose K targets are all in the text."""
        whole = correct_XK[real_XK.all(dim=1)]
        accepted = whole.long().cumprod(dim=1).sum(dim=1)
        return torch.bincount(accepted, minlength=correct_XK.shape[1] + 1)

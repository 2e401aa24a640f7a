"""The toy network and how it is trained.

Alignment: slot t has the features of position t and the embedding of token t + 1, which was just emitted; head
k predicts token t + 2 + k, whose distribution the verifier gives at position t + 1 + k. The trap: the features of the
token just emitted are not known yet when drafting starts.

Shapes: T tokens of the row, S slots, A features a position, H hidden, K heads.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from heads.config import HeadsConfig
from speculators.algorithms.base import Algorithm, Batch, StepOutput
from speculators.algorithms.documents import Documents
from speculators.algorithms.layers import RMSNorm, linear_input
from speculators.algorithms.losses import Rows, distillation_loss, greedy_tokens
from speculators.algorithms.trained_draft import TrainedDraft

if TYPE_CHECKING:
    from speculators.data.vocab import VocabMap
    from speculators.training.options import TrainOptions
    from speculators.verifier import Verifier


class HeadsModel(nn.Module):
    """The trained part; submodules have the names of the tensors on disk."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.fc = nn.Linear((len(config.aux_layer_ids) + 1) * H, H, bias=False)
        self.heads = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(config.num_heads_out))
        self.norm = RMSNorm(H, config.rms_norm_eps)

    def forward(self, aux_SAH: Tensor, embeds_SH: Tensor) -> Tensor:
        """[S, K, H]: what the output rows read."""
        joined = torch.cat([aux_SAH.flatten(1), embeds_SH.to(aux_SAH.dtype)], dim=1)
        state = self.fc(linear_input(joined))
        return self.norm(torch.stack([state + head(nn.functional.silu(state)) for head in self.heads], dim=1))


class Heads(TrainedDraft, Algorithm):
    """A draft of heads in training."""

    config: HeadsConfig
    module: HeadsModel

    @classmethod
    def build(cls, config: HeadsConfig, verifier: "Verifier", vocab: "VocabMap", options: "TrainOptions") -> "Heads":
        """A new draft with random weights from `options.seed`."""
        torch.manual_seed(options.seed)
        return cls(config, HeadsModel(config), verifier, vocab, options)

    def step(self, batch: Batch, generator: torch.Generator) -> StepOutput:
        documents, K = Documents.of(batch, self.vocab), self.config.num_speculative_tokens
        targets = torch.stack([documents.shifted(documents.draft_targets, 2 + k, -1) for k in range(K)], dim=1)
        real = torch.stack([documents.shifted(documents.supervised, 2 + k, False) for k in range(K)], dim=1)
        slots = real.any(dim=1).nonzero()[:, 0]
        targets, real = targets[slots], real[slots]

        normed = self._heads(batch, documents, slots)
        slot, k = (targets >= 0).nonzero(as_tuple=True)
        position = slots[slot] + 1 + k
        order = torch.argsort(position, stable=True)
        slot, k = slot[order], k[order]
        rows = Rows(normed[slot, k], position[order], targets[slot, k], torch.ones(len(slot), device=slots.device))
        loss, hit = distillation_loss(rows, self.head.normalize(batch.last_hidden), self.ends, self.mix)

        correct = torch.zeros(targets.shape, dtype=torch.bool, device=slots.device)
        correct[slot, k] = hit
        return StepOutput(loss, len(slot), self.histogram_of(correct, real), {})

    def _heads(self, batch: Batch, documents: Documents, slots: Tensor) -> Tensor:
        next_ids = documents.shifted(batch.ids, 1, 0)[slots]
        return self.module(batch.aux_hidden[slots], self.ends.embed(next_ids))

    @torch.no_grad()
    def accepted_from_every_position(self, batch: Batch) -> Tensor:
        documents, K = Documents.of(batch, self.vocab), self.config.num_speculative_tokens
        # The token at t was just emitted, so slot t - 1 proposes tokens t + 1, t + 2, ...
        slots = torch.arange(len(batch.ids) - 1, device=batch.ids.device)
        normed = self._heads(batch, documents, slots)
        drafted = self.draft_token_ids[greedy_tokens(normed.flatten(0, 1), self.ends)].unflatten(0, (-1, K))
        truth = torch.stack([documents.shifted(batch.ids, 2 + k, -1)[slots] for k in range(K)], dim=1)
        accepted = (drafted == truth).long().cumprod(dim=1).sum(dim=1)
        return torch.cat([accepted.new_zeros(1), accepted])


OBJECTIVE = Heads

"""Masked-block training (DFlash, section 4): sample anchors, predict the rest of each block in one pass.

Slot s of the block at anchor a predicts token a + s, so the verifier's distribution for it is the one at a + s - 1.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculators.algorithms.base import Algorithm, Batch, Metric, StepOutput
from speculators.algorithms.dflash.config import DFlashConfig
from speculators.algorithms.dflash.model import DFlashModel
from speculators.algorithms.documents import Documents
from speculators.algorithms.losses import Reweigh, Rows, distillation_loss, greedy_tokens
from speculators.algorithms.row_shapes import fill_up
from speculators.algorithms.trained_draft import TrainedDraft

if TYPE_CHECKING:
    from speculators.data.vocab import VocabMap
    from speculators.training.options import TrainOptions
    from speculators.verifier import Verifier


class DFlash(TrainedDraft, Algorithm):
    """A dflash draft in training."""

    config: DFlashConfig
    module: DFlashModel

    @classmethod
    def build(cls, config: DFlashConfig, verifier: "Verifier", vocab: "VocabMap", options: "TrainOptions") -> "DFlash":
        """A new draft with random weights from `options.seed`; a learned mask embedding starts as the mask token's."""
        torch.manual_seed(options.seed)
        draft = cls(config, DFlashModel(config), verifier, vocab, options)
        if config.learn_mask_embedding:
            with torch.no_grad():
                draft.module.mask_embedding.copy_(draft.head.embedding_VH[config.mask_token_id])
        return draft

    def step(self, batch: Batch, generator: torch.Generator) -> StepOutput:
        batch = fill_up(batch)
        documents = Documents.of(batch, self.vocab)
        anchors, candidates = self._sample_anchors(documents, generator)
        K = self.config.num_speculative_tokens
        targets = torch.stack([documents.shifted(documents.draft_targets, s, -1)[anchors] for s in range(1, K + 1)], 1)
        real = torch.stack([documents.shifted(documents.supervised, s, False)[anchors] for s in range(1, K + 1)], 1)

        normed = self._blocks(batch, documents, anchors).flatten(0, 1)
        block, slot = (targets >= 0).nonzero(as_tuple=True)
        position = anchors[block] + slot
        order = torch.argsort(position, stable=True)
        block, slot = block[order], slot[order]
        weight, reweigh = self._slot_weights(block, slot, targets)
        hidden = normed.index_select(0, block * self.config.block_size + 1 + slot)
        rows = Rows(hidden, position[order], targets[block, slot], weight)
        loss, hit = distillation_loss(rows, self.head.normalize(batch.last_hidden), self.ends, self.mix, reweigh)

        correct = torch.zeros_like(real)
        correct[block, slot] = hit
        touched = torch.zeros_like(documents.supervised)
        touched[(anchors[:, None] + 1 + torch.arange(K, device=anchors.device))[real]] = True
        metrics = {
            "anchor_coverage": Metric(float(touched.sum()), float(max(1, int(documents.supervised.sum())))),
            "anchors_used": Metric(float(len(anchors)), float(max(1, candidates))),
        }
        return StepOutput(loss, len(position), self.histogram_of(correct, real), metrics)

    def _slot_weights(self, block: Tensor, slot: Tensor, targets_AK: Tensor) -> tuple[Tensor, Reweigh | None]:
        """What each row weighs, and how its weight follows from what the draft knows already."""
        options = self.options
        if options.position_weights == "dpace":
            chance_AK = torch.zeros(targets_AK.shape, device=slot.device)
            return torch.ones(len(slot), device=slot.device), partial(
                reach, block, slot, chance_AK, options.dpace_alpha
            )
        return torch.exp(-slot / options.decay_gamma(self.config.block_size)), None

    def _sample_anchors(self, documents: Documents, generator: torch.Generator) -> tuple[Tensor, int]:
        """Up to `max_anchors` anchors whose next token is supervised, sorted; and how many there were in all."""
        candidates = documents.shifted(documents.supervised, 1, False).nonzero()[:, 0]
        chosen = torch.randperm(len(candidates), generator=generator)[: self.options.max_anchors].sort().values
        return candidates[chosen.to(candidates.device)], len(candidates)

    def _blocks(self, batch: Batch, documents: Documents, anchors: Tensor) -> Tensor:
        """Head inputs [A, B, H] of the blocks at these anchors."""
        ids = torch.full((len(anchors), self.config.block_size), self.config.mask_token_id, device=anchors.device)
        ids[:, 0] = batch.ids[anchors]
        embeds = self.ends.embed(ids)
        return self.module(batch.aux_hidden, batch.positions, embeds, documents.start[anchors], anchors)

    @torch.no_grad()
    def accepted_from_every_position(self, batch: Batch) -> Tensor:
        documents = Documents.of(batch, self.vocab)
        K = self.config.num_speculative_tokens
        truth = torch.stack([documents.shifted(batch.ids, s, -1) for s in range(1, K + 1)], dim=1)
        accepted = []
        for anchors in torch.arange(len(batch.ids), device=batch.ids.device).split(256):
            drafted = self.draft_token_ids[
                greedy_tokens(self._blocks(batch, documents, anchors)[:, 1:].flatten(0, 1), self.ends)
            ]
            accepted.append((drafted.unflatten(0, (-1, K)) == truth[anchors]).long().cumprod(dim=1).sum(dim=1))
        return torch.cat(accepted)


def reach(block_X: Tensor, slot_X: Tensor, chance_AK: Tensor, alpha: float, chance_X: Tensor) -> Tensor:
    """float32 [X]: how likely serving gets as far as each row's slot, the product of the smoothed chances
    (1 - alpha) q + alpha of the slots before it (D-PACE). `chance_AK` holds 0 where a target is outside the draft
    vocabulary, since it is never proposed; it is filled in."""
    chance_AK[block_X, slot_X] = chance_X
    smoothed = (1 - alpha) * chance_AK + alpha
    before = torch.cat([torch.ones_like(smoothed[:, :1]), smoothed[:, :-1]], dim=1)
    return before.cumprod(dim=1)[block_X, slot_X]


OBJECTIVE = DFlash

"""Training-time test (EAGLE-3, section 3.2): unroll every supervised slot's chain, match the verifier at each step."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from speculators.algorithms.base import Algorithm, Batch, Metric, StepOutput
from speculators.algorithms.documents import Documents
from speculators.algorithms.eagle3.config import Eagle3Config
from speculators.algorithms.eagle3.model import Eagle3Model, Slots
from speculators.algorithms.losses import Rows, distillation_loss, greedy_tokens
from speculators.algorithms.row_shapes import fill_up, repeat_last
from speculators.algorithms.trained_draft import TrainedDraft

if TYPE_CHECKING:
    from speculators.data.vocab import VocabMap
    from speculators.training.options import TrainOptions
    from speculators.verifier import Verifier


class Eagle3(TrainedDraft, Algorithm):
    """An eagle3 draft in training."""

    config: Eagle3Config
    module: Eagle3Model

    @classmethod
    def build(cls, config: Eagle3Config, verifier: "Verifier", vocab: "VocabMap", options: "TrainOptions") -> "Eagle3":
        """A new draft with random weights from `options.seed`; fc starts by passing the last feature through."""
        torch.manual_seed(options.seed)
        return cls(config, Eagle3Model(config), verifier, vocab, options)

    def step(self, batch: Batch, generator: torch.Generator) -> StepOutput:
        batch = fill_up(batch)
        documents = Documents.of(batch, self.vocab)
        steps = self.config.ttt_steps
        # Slot t's step j predicts token t + 2 + j; a slot is selected when any of its steps has a supervised target.
        targets = torch.stack([documents.shifted(documents.draft_targets, 2 + j, -1) for j in range(steps)])
        real = torch.stack([documents.shifted(documents.supervised, 2 + j, False) for j in range(steps)])
        selected = real.any(0).nonzero()[:, 0]
        index = repeat_last(selected)
        targets, real = targets[:, index], real[:, index]
        targets[:, len(selected) :], real[:, len(selected) :] = -1, False

        step, slot = (targets >= 0).nonzero(as_tuple=True)
        position = index[slot] + 1 + step
        order = torch.argsort(position, stable=True)
        step, slot = step[order], slot[order]
        normed = torch.cat(self._unroll(batch, documents, index)).index_select(0, step * len(index) + slot)
        rows = Rows(normed, position[order], targets[step, slot], self.options.step_decay ** step.float())
        loss, hit = distillation_loss(rows, self.head.normalize(batch.last_hidden), self.ends, self.mix)

        correct = torch.zeros_like(real)
        correct[step, slot] = hit
        histogram = self.histogram_of(correct.T, real.T)
        covered = Metric(float(targets[0].ge(0).sum()), float(max(1, int(real[0].sum()))))
        return StepOutput(loss, len(position), histogram, {"in_draft_vocab": covered})

    def _unroll(
        self, batch: Batch, documents: Documents, index: Tensor, drafted: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Head inputs [S, H] of each step; teacher-forced, or on its own tokens when `drafted` is a list to fill."""
        everything = torch.arange(len(batch.ids), device=batch.ids.device)
        all_slots = Slots(everything, documents.start, self.module.rotary.rows(batch.positions))
        slots = Slots(index, documents.start[index], all_slots.rotary[index])
        next_ids = documents.shifted(batch.ids, 1, 0)
        hidden = self.module.features(batch.aux_hidden)
        stream, chain = self.module.first_step(self.ends.embed(next_ids), hidden, slots, all_slots)
        outputs: list[Tensor] = []
        while True:
            normed, feedback = self.module.feedback(stream)
            outputs.append(normed)
            if drafted is not None:
                drafted.append(self.draft_token_ids[greedy_tokens(normed, self.ends)])
            j = len(outputs)
            if j == self.config.ttt_steps:
                return outputs
            ids = drafted[-1] if drafted is not None else documents.shifted(batch.ids, 1 + j, 0)[index]
            at = slots._replace(rotary=self.module.rotary.rows(batch.positions[index] + j))
            stream = self.module.next_step(self.ends.embed(ids), feedback, at, chain)

    @torch.no_grad()
    def accepted_from_every_position(self, batch: Batch) -> Tensor:
        documents = Documents.of(batch, self.vocab)
        # The token at t was just emitted, so the chain starts at slot t - 1 and proposes tokens t + 1, t + 2, ...
        index = torch.arange(len(batch.ids) - 1, device=batch.ids.device)
        drafted: list[Tensor] = []
        self._unroll(batch, documents, index, drafted)
        hits = [proposed == documents.shifted(batch.ids, 2 + j, -1)[index] for j, proposed in enumerate(drafted)]
        accepted = torch.stack(hits, dim=1).long().cumprod(dim=1).sum(dim=1)
        return torch.cat([accepted.new_zeros(1), accepted])


OBJECTIVE = Eagle3

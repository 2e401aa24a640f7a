"""What the trainer and an algorithm say to each other. The trainer knows these types and no algorithm's name."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from speculators.algorithms.draft_config import DraftConfig

if TYPE_CHECKING:
    from speculators.data.vocab import VocabMap
    from speculators.training.options import TrainOptions
    from speculators.verifier import Verifier


class Batch(NamedTuple):
    """One packed row of T tokens from one or more documents (samples), T varying from row to row.

    Attributes:
        ids: int64 [T], verifier token ids.
        positions: int64 [T], position inside the document, from 0.
        document_ids: int64 [T], 0, 0, ..., 1, 1, ...: which document a token belongs to, ascending.
        loss_mask: bool [T], True where the token is a target (written by the assistant).
        aux_hidden: bfloat16 [T, A, H], see `HiddenStates`.
        last_hidden: bfloat16 [T, H], before the verifier's final norm.
        sample_ids: the documents' sample ids, in order.
    """

    ids: Tensor
    positions: Tensor
    document_ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    last_hidden: Tensor
    sample_ids: tuple[str, ...]


class Metric(NamedTuple):
    """A mean in the making: sums and counts add up over rows and ranks."""

    total: float
    out_of: float


class StepOutput(NamedTuple):
    """What one row gives.

    Attributes:
        loss_sum: scalar with gradient, the *sum* of the loss over this row's targets; the trainer divides once, by the
            global number of targets.
        num_targets: how many targets are in that sum.
        histogram: int64 [K + 1] on any device; drafts by accepted tokens (teacher-forced, greedy), see `Acceptance`.
        metrics: named (sum, count) pairs for the log, such as the share of supervised tokens that the anchors covered.
    """

    loss_sum: Tensor
    num_targets: int
    histogram: Tensor
    metrics: dict[str, Metric]


class Algorithm(ABC):
    """A draft in training: the trained module and what to do with a row."""

    config: DraftConfig
    module: nn.Module

    @classmethod
    @abstractmethod
    def build(cls, config: Any, verifier: "Verifier", vocab: "VocabMap", options: "TrainOptions") -> "Algorithm":
        """A new draft; `config` is of the algorithm's own config class."""

    @abstractmethod
    def step(self, batch: Batch, generator: torch.Generator) -> StepOutput:
        """Loss and counts of one row. `generator` (CPU) drives every random choice, so a resumed run repeats them."""

    @abstractmethod
    def accepted_from_every_position(self, batch: Batch) -> Tensor:
        """int64 [T]: with the token at t just emitted by the verifier, how many of the next K tokens of the text a
        greedy draft gets right before its first mistake. Entry t is meaningful where t + 1 is in the same document;
        drafts end with the document. No gradient."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move the module and the frozen parts."""

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Every tensor of `config.tensor_shapes()`, trained and frozen alike."""

    @abstractmethod
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the trained weights from a checkpoint's tensors (the float32 masters are set from them)."""

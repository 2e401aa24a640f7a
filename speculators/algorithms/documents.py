"""The one place that knows where documents begin and end in a packed row, so that no target crosses a boundary."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from speculators.algorithms.base import Batch

if TYPE_CHECKING:
    from speculators.data.vocab import VocabMap


class Documents(NamedTuple):
    """Per-token facts of a row of T tokens.

    Attributes:
        ids: int64 [T], the row's document numbers.
        start: int64 [T], index of the first token of the token's document.
        supervised: bool [T], whether the token is a target.
        draft_targets: int64 [T], the token's id in the draft vocabulary where it is a target and in it, else -1.
    """

    ids: Tensor
    start: Tensor
    supervised: Tensor
    draft_targets: Tensor

    @classmethod
    def of(cls, batch: Batch, vocab: "VocabMap") -> "Documents":
        """Read the facts off a row."""
        document_ids = batch.document_ids
        arange = torch.arange(len(document_ids), device=document_ids.device)
        is_first = torch.ones_like(document_ids, dtype=torch.bool)
        is_first[1:] = document_ids[1:] != document_ids[:-1]
        start = torch.where(is_first, arange, 0).cummax(0).values
        in_draft = torch.from_numpy(vocab.to_draft(batch.ids.cpu().numpy())).to(document_ids.device)
        return cls(document_ids, start, batch.loss_mask, torch.where(batch.loss_mask, in_draft, -1))

    def shifted(self, values_T: Tensor, by: int, outside: int | bool) -> Tensor:
        """[T]: `values_T[t + by]` where t + by lies in the same document, else `outside`."""
        result = torch.full_like(values_T, outside)
        if by < len(values_T):
            same = self.ids[by:] == self.ids[:-by] if by else torch.ones_like(self.ids, dtype=torch.bool)
            result[: len(values_T) - by] = torch.where(same, values_T[by:], result[: len(values_T) - by])
        return result

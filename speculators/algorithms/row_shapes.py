"""Row counts that vary are filled up to a multiple, so that few different shapes reach the matrix products.

oneDNN prepares a product anew for each shape that it has not met lately, which takes longer than the product itself.
"""

import torch
from torch import Tensor

from speculators.algorithms.base import Batch

ROW_MULTIPLE = 64


def repeat_last(rows: Tensor) -> Tensor:
    """The last row repeated up to a multiple of `ROW_MULTIPLE` rows; no rows stay none."""
    missing = -len(rows) % ROW_MULTIPLE
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


def fill_up(batch: Batch) -> Batch:
    """The row with one more document of unsupervised tokens, up to a multiple of `ROW_MULTIPLE` tokens."""
    missing = -len(batch.ids) % ROW_MULTIPLE
    if not missing:
        return batch
    spare = Batch(*(x.new_zeros(missing, *x.shape[1:]) if isinstance(x, Tensor) else x for x in batch))
    spare = spare._replace(document_ids=spare.document_ids + batch.document_ids[-1] + 1)
    return Batch(*(torch.cat([x, y]) if isinstance(x, Tensor) else x for x, y in zip(batch, spare, strict=True)))

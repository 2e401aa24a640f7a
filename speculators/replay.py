"""Predicted acceptance: an exact draft-and-verify walk over text that the verifier itself wrote.

At temperature 0 the verifier accepts a drafted token exactly when it is the next token of its own answer. So the walk
starts where serving does, with the first answer token just emitted, drafts, accepts what agrees, jumps accepted + 1,
and goes on to the end of the answer. The draft sees what it sees when served: the verifier's states for everything
emitted, its own output (eagle3) or mask tokens (dflash) beyond. What the walk can't know is whether tokens drafted
beyond the end of the text would have been accepted; they count as rejected.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from speculators.acceptance import Acceptance
from speculators.algorithms.base import Algorithm, Batch


def walk(accepted_T: np.ndarray, loss_mask_T: np.ndarray, num_speculative_tokens: int) -> Acceptance:
    """Walk every answer of one document.

    Args:
        accepted_T: int [T], what `Algorithm.accepted_from_every_position` gives.
        loss_mask_T: bool [T], True on the answers' tokens; each run of them is one answer.
        num_speculative_tokens: K.
    """
    histogram = [0] * (num_speculative_tokens + 1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], loss_mask_T, [False]]).astype(np.int8)))
    for first, end in edges.reshape(-1, 2):
        t = int(first)
        while t + 1 < end:
            # Tokens after the answer (the template's own) are no part of what the verifier emitted.
            accepted = min(int(accepted_T[t]), int(end) - 1 - t)
            histogram[accepted] += 1
            t += accepted + 1
    return Acceptance.from_histogram(histogram)


def replay(
    algorithm: Algorithm, batches: Iterable[Batch], on_walked: Callable[[int], None] = lambda tokens: None
) -> list[tuple[str, Acceptance]]:
    """Walk every document of these rows; returns (sample id, acceptance) in order.

    Args:
        algorithm: the draft.
        batches: rows on the draft's device.
        on_walked: called with the number of tokens after each row.
    """
    walked = []
    algorithm.module.eval()
    for batch in batches:
        with torch.no_grad():
            accepted = algorithm.accepted_from_every_position(batch).cpu().numpy()
        documents, mask = batch.document_ids.cpu().numpy(), batch.loss_mask.cpu().numpy()
        for number, sample_id in enumerate(batch.sample_ids):
            own = documents == number
            walked.append((sample_id, walk(accepted[own], mask[own], algorithm.config.num_speculative_tokens)))
        on_walked(len(documents))
    algorithm.module.train()
    return walked

"""Distillation loss over the draft vocabulary in chunks of rows, its gradient made in the same pass.

The output rows are frozen, so the backward of the head is one product, dH = dZ W, and no [rows, vocabulary] tensor
outlives its chunk. The verifier's distribution is computed once per position, however many rows predict that position.

Shapes: X rows (predictions), P verifier positions, H hidden, D draft vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from speculators.algorithms.row_shapes import repeat_last
from speculators.algorithms.verifier_head import VerifierHead

_CHUNK_ROWS = 512


class LossMix(NamedTuple):
    """Weights of the three losses: hard-label cross-entropy, KL(verifier || draft), and total variation."""

    ce: float = 0.0
    kl_div: float = 1.0
    tv: float = 0.0


class Rows(NamedTuple):
    """Predictions sorted by the verifier position that knows their answer.

    Attributes:
        hidden: [X, H], draft states after its final norm.
        position: int64 [X], ascending; row of `normed_PH` whose distribution this row should match.
        target: int64 [X], draft-vocabulary id of the text's token.
        weight: float32 [X], the row's weight in the loss.
    """

    hidden: Tensor
    position: Tensor
    target: Tensor
    weight: Tensor


Reweigh = Callable[[Tensor], Tensor]
"""float32 [X], the draft's probability of each row's target -> float32 [X], factors of the rows' weights."""


def distillation_loss(
    rows: Rows, normed_PH: Tensor, head: VerifierHead, mix: LossMix, reweigh: Reweigh | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted loss sum over rows (scalar, with gradient into `rows.hidden`) and, for each row, whether the draft's
    most likely token is the target (bool [X]).

    Per row, with verifier distribution p and draft distribution q over the draft vocabulary:
    ce = -log q[target]; kl_div = sum p log(p / q); tv = sum |p - q| / 2. No gradient flows through `reweigh`.
    """
    if not len(rows.hidden):
        return rows.hidden.sum(), torch.zeros(0, dtype=torch.bool, device=rows.hidden.device)
    loss, correct = _Distillation.apply(*rows, normed_PH, head, mix, reweigh)
    return loss, correct


def greedy_tokens(hidden_XH: Tensor, head: VerifierHead) -> Tensor:
    """int64 [X]: the draft's most likely token of each row, as draft-vocabulary ids."""
    chunks = hidden_XH.to(head.output_DH.dtype).split(_CHUNK_ROWS)
    return torch.cat([_most_likely(F.linear(chunk, head.output_DH)) for chunk in chunks])


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, position, target, weight, normed, head, mix, reweigh):  # type: ignore[no-untyped-def]
        states = hidden.detach().to(head.output_DH.dtype)
        grad = torch.empty_like(states)
        losses, chance = torch.empty_like(weight), torch.empty_like(weight)
        correct = torch.empty(len(states), dtype=torch.bool, device=states.device)
        with torch.autocast(states.device.type, enabled=False):
            for a in range(0, len(states), _CHUNK_ROWS):
                part = slice(a, a + _CHUNK_ROWS)
                h, where, wanted = (repeat_last(rows[part]) for rows in (states, position, target))
                x = len(states[part])
                chunk = _chunk(h, where, wanted, normed, head, mix)
                losses[part], chance[part], correct[part] = chunk.loss[:x], chunk.chance[:x], chunk.hit[:x]
                grad[part] = chunk.dh[:x].mul_(weight[part, None])
        if reweigh is not None:
            factor = reweigh(chance)
            weight = weight * factor
            grad.mul_(factor[:, None])
        ctx.save_for_backward(grad)
        ctx.input_dtype = hidden.dtype
        ctx.mark_non_differentiable(correct)
        return torch.dot(losses.double(), weight.double()).float(), correct

    @staticmethod
    def backward(ctx, grad_loss, _):  # type: ignore[no-untyped-def]
        (grad,) = ctx.saved_tensors
        return (grad * grad_loss).to(ctx.input_dtype), *[None] * 7


class _Chunk(NamedTuple):
    """Of some rows: losses [x], their gradient with respect to the hidden states [x, H], the draft's probability of
    the target [x], and whether the target is its most likely token [x]."""

    loss: Tensor
    dh: Tensor
    chance: Tensor
    hit: Tensor


def _chunk(
    h_xH: Tensor, position_x: Tensor, target_x: Tensor, normed_PH: Tensor, head: VerifierHead, mix: LossMix
) -> _Chunk:
    """One chunk of rows.

    With z = W h, the gradients are W^T (q - onehot) for ce, W^T (q - p) for kl_div, and W^T q (g - sum q g) with
    g = sign(q - p) / 2 for tv. W^T p and the entropy of p are made once per position, not once per row, and
    sum p z = (W^T p) h needs no pass over the vocabulary. With bfloat16 weights the logits and q are rounded to it.
    """
    W_DH = head.output_DH
    z = F.linear(h_xH, W_DH)
    q = torch.softmax(z, dim=-1)
    log_norm = _log_norm(z, q)
    log_chance = z.gather(1, target_x[:, None])[:, 0].float() - log_norm
    losses, dh = torch.zeros(len(z), device=z.device), torch.zeros(h_xH.shape, device=h_xH.device)
    if mix.kl_div or mix.ce:
        dh += (mix.kl_div + mix.ce) * (q @ W_DH)
    if mix.ce:
        losses -= mix.ce * log_chance
        dh -= mix.ce * W_DH[target_x]
    if mix.kl_div or mix.tv:
        unique, index = torch.unique_consecutive(position_x, return_inverse=True)
        verifier_z = head.verifier_logits(normed_PH[repeat_last(unique)])
        p = torch.softmax(verifier_z, dim=-1)
        if mix.kl_div:
            expected = (p.to(W_DH.dtype) @ W_DH).float()[index]
            negative_entropy = torch.linalg.vecdot(p, verifier_z) - _log_norm(verifier_z, p)
            cross_entropy = log_norm - torch.linalg.vecdot(expected, h_xH.float())
            losses += mix.kl_div * (negative_entropy[index] + cross_entropy)
            dh -= mix.kl_div * expected
        if mix.tv:
            q = torch.softmax(z.float(), dim=-1)
            difference = q - p[index]
            losses += mix.tv * 0.5 * difference.abs().sum(-1)
            g = difference.sign_().mul_(0.5)
            dz = q * (g - torch.linalg.vecdot(q, g)[:, None])
            dh += mix.tv * (dz.to(W_DH.dtype) @ W_DH)
    return _Chunk(losses, dh, log_chance.exp(), _most_likely(z) == target_x)


def _most_likely(z_xD: Tensor) -> Tensor:
    """The first largest entry of each row; `argmax` takes three times as long on a CPU."""
    return z_xD.max(dim=-1).indices


def _log_norm(z_xD: Tensor, softmax_xD: Tensor) -> Tensor:
    """log sum exp of each row, float32, read off its largest entry instead of a second pass of exponentials."""
    top = z_xD.amax(dim=-1).float()
    return top - softmax_xD.amax(dim=-1).float().log()

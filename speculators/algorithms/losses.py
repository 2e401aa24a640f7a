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

from speculators.algorithms.row_shapes import ROW_MULTIPLE, repeat_last
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
        room = _room(len(states), head.output_DH)
        with torch.autocast(states.device.type, enabled=False):
            for a in range(0, len(states), _CHUNK_ROWS):
                part = slice(a, a + _CHUNK_ROWS)
                h, where, wanted = (repeat_last(rows[part]) for rows in (states, position, target))
                x = len(states[part])
                chunk = _chunk(h, where, wanted, normed, head, mix, room)
                losses[part], chance[part], correct[part] = chunk.loss[:x], chunk.chance[:x], chunk.hit[:x]
                torch.mul(chunk.dh[:x], weight[part, None], out=grad[part])
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


class _Targets(NamedTuple):
    """Of some positions: sum p log p [u], and W^T p, the head input that kl_div pulls towards [u, H]."""

    negative_entropy: Tensor
    expected: Tensor


def _chunk(
    h_xH: Tensor,
    position_x: Tensor,
    target_x: Tensor,
    normed_PH: Tensor,
    head: VerifierHead,
    mix: LossMix,
    room_xD: Tensor,
) -> _Chunk:
    """One chunk of rows.

    With z = W h, the gradients are W^T (q - onehot) for ce, W^T (q - p) for kl_div, and W^T q (g - sum q g) with
    g = sign(q - p) / 2 for tv. W^T p and the entropy of p are made once per position, not once per row, and
    sum p z = (W^T p) h needs no pass over the vocabulary. With bfloat16 weights the logits and q are rounded to it.
    Logits and then, in their place, probabilities live in `room_xD`, which is used again for each chunk: fresh memory
    costs more than the arithmetic.
    """
    W_DH = head.output_DH
    losses, dh = torch.zeros(len(h_xH), device=h_xH.device), None
    unique, index = torch.unique_consecutive(position_x, return_inverse=True)
    if mix.kl_div:
        targets = _targets(normed_PH[repeat_last(unique)], head, room_xD)
    z = torch.mm(h_xH, W_DH.t(), out=room_xD[: len(h_xH)])
    top, likely = z.max(dim=-1)
    target_z = z.gather(1, target_x[:, None])[:, 0].float()
    whole_q = torch.softmax(z.float(), dim=-1) if mix.tv else None
    q = _softmax_(z)
    log_norm = top.float() - q.gather(1, likely[:, None])[:, 0].float().log()
    log_chance = target_z - log_norm
    if mix.kl_div or mix.ce:
        dh = torch.mm(q, W_DH).float()
        if mix.kl_div + mix.ce != 1:
            dh *= mix.kl_div + mix.ce
    else:
        dh = torch.zeros(h_xH.shape, device=h_xH.device)
    if mix.ce:
        losses -= mix.ce * log_chance
        dh.sub_(W_DH[target_x], alpha=mix.ce)
    if mix.kl_div:
        expected = targets.expected[index]
        cross_entropy = log_norm - torch.linalg.vecdot(expected, h_xH.float())
        losses += mix.kl_div * (targets.negative_entropy[index] + cross_entropy)
        dh.sub_(expected, alpha=mix.kl_div)
    if whole_q is not None:
        p = torch.softmax(head.verifier_logits(normed_PH[repeat_last(unique)]), dim=-1)
        difference = whole_q - p[index]
        losses += mix.tv * 0.5 * difference.abs().sum(-1)
        g = difference.sign_().mul_(0.5)
        dz = whole_q * (g - torch.linalg.vecdot(whole_q, g)[:, None])
        dh += mix.tv * (dz.to(W_DH.dtype) @ W_DH)
    return _Chunk(losses, dh, log_chance.exp(), likely == target_x)


def _targets(normed_uH: Tensor, head: VerifierHead, room_xD: Tensor) -> _Targets:
    """What kl_div needs of the verifier at these positions."""
    W_DH = head.output_DH
    if not head.plain_logits:
        logits = head.verifier_logits(normed_uH)
        p = torch.softmax(logits, dim=-1)
        return _Targets(
            torch.linalg.vecdot(p, logits) - torch.logsumexp(logits, dim=-1), (p.to(W_DH.dtype) @ W_DH).float()
        )
    logits = torch.mm(normed_uH, W_DH.t(), out=room_xD[: len(normed_uH)])
    top = logits.amax(dim=-1).float()
    p = _softmax_(logits)
    log_norm = top - p.amax(dim=-1).float().log()
    expected = torch.mm(p, W_DH).float()
    return _Targets(torch.linalg.vecdot(expected, normed_uH.float()) - log_norm, expected)


def _room(rows: int, W_DH: Tensor) -> Tensor:
    """[x, D], uninitialised, for the logits of the largest chunk."""
    return W_DH.new_empty(min(_CHUNK_ROWS, rows) + ROW_MULTIPLE, len(W_DH))


def _softmax_(z_xD: Tensor) -> Tensor:
    """The probabilities, on a CPU in the place of the logits."""
    if z_xD.is_cuda:
        return torch.softmax(z_xD, dim=-1)
    probabilities: Tensor = torch.ops.aten._softmax.out(z_xD, -1, False, out=z_xD)
    return probabilities


def _most_likely(z_xD: Tensor) -> Tensor:
    """The first largest entry of each row; `argmax` takes three times as long on a CPU."""
    return z_xD.max(dim=-1).indices

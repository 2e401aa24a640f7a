"""Layer formulas as one autograd node each, for a CPU: fewer passes over memory and less kept for the backward pass.

Arithmetic is float32, inputs and results may be bfloat16. The trap: what a node keeps is what its inputs were, so
nothing here may change an input in place, and the caller must not either.

Shapes: X rows of any kind, n entries that are normed together, N heads of D entries, R of which turn; I intermediate.
"""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight_n: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in `dtype`."""
    normed: Tensor = _RMSNorm.apply(x, weight_n, eps, dtype)
    return normed


def turned_heads(
    x_XND: Tensor, weight_D: Tensor | None, eps: float, cos_X1R: Tensor, sin_X1R: Tensor, dtype: torch.dtype
) -> Tensor:
    """[X, N, D]: each head normed, if there is a weight, and its first R entries turned, in `dtype`."""
    turned: Tensor = _TurnedHeads.apply(x_XND, weight_D, eps, cos_X1R, sin_X1R, dtype)
    return turned


def swiglu(x_XH: Tensor, gate_up_JH: Tensor, down_HI: Tensor) -> Tensor:
    """[X, H]: down(silu(gate(x)) * up(x)), where J = 2 I holds the rows of gate and then of up. All of one dtype."""
    out: Tensor = _SwiGLU.apply(x_XH, gate_up_JH, down_HI)
    return out


def joined(dtype: torch.dtype, *weights: Tensor) -> Tensor:
    """Matrices one below the other as one matrix of `dtype`; the gradient comes back in the weights' own dtype."""
    matrix: Tensor = _Joined.apply(dtype, *weights)
    return matrix


def _rstd(x: Tensor, eps: float) -> Tensor:
    """float32 [..., 1]: 1 / sqrt(mean(x^2) + eps)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_gradient(
    grad: Tensor, x: Tensor, weight_n: Tensor, rstd: Tensor, wants_dx: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Gradients of x, in its dtype, and of the weight; `grad` is float32 and is used up.

    With u = x rstd: dw = sum_X grad u; dx = rstd (grad w - u mean(grad w u)).
    """
    n = x.shape[-1]
    u = x * rstd
    product = (grad * u).reshape(-1, n)
    if not wants_dx:
        return None, product.sum(0)
    mean = torch.mv(product, weight_n / n).view(rstd.shape)
    dx = grad.mul_(weight_n).addcmul_(u, mean, value=-1).mul_(rstd)
    return dx.to(x.dtype), product.sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        rstd = _rstd(x, eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x * rstd).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        grad = grads[0].to(torch.float32, copy=True)
        return *_norm_gradient(grad, x, weight, rstd, ctx.needs_input_grad[0]), None, None


class _TurnedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> Tensor:
        rstd = _rstd(x, eps) if weight is not None else None
        kept = x if weight is not None else None
        ctx.save_for_backward(kept, weight, rstd, cos, sin)
        ctx.dtype = x.dtype
        normed = x.float() if rstd is None or weight is None else (x * rstd).mul_(weight)
        return _turn(normed, cos, sin, 1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, rstd, cos, sin = ctx.saved_tensors
        grad = _turn(grads[0].float(), cos, sin, -1)
        if weight is None:
            return grad.to(ctx.dtype), *[None] * 5
        return *_norm_gradient(grad, x, weight, rstd), *[None] * 4


def _turn(x_XND: Tensor, cos_X1R: Tensor, sin_X1R: Tensor, sign: int) -> Tensor:
    """A new tensor: the first R entries of each head turned by the angles (sign 1), or the transpose of that (-1).

    Half-split layout: entries i and i + R / 2 form a pair. The tables may carry a scale, and hold each angle twice.
    """
    R = cos_X1R.shape[-1]
    half = R // 2
    turned = x_XND.new_empty(x_XND.shape)
    turned[..., R:] = x_XND[..., R:]
    torch.mul(x_XND[..., :R], cos_X1R, out=turned[..., :R])
    turned[..., :half].addcmul_(x_XND[..., half:R], sin_X1R[..., :half], value=-sign)
    turned[..., half:R].addcmul_(x_XND[..., :half], sin_X1R[..., half:], value=sign)
    return turned


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        both = torch.mm(x, gate_up.t())
        ctx.save_for_backward(x, gate_up, down, both)
        gate, up = both.chunk(2, dim=1)
        return torch.mm(torch.nn.functional.silu(gate).mul_(up), down.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gate_up, down, both = ctx.saved_tensors
        grad = grads[0].to(down.dtype)
        gate, up = both.chunk(2, dim=1)
        inner = torch.mm(grad, down)
        silu = torch.nn.functional.silu(gate)
        d_both = torch.empty_like(both)
        d_gate, d_up = d_both.chunk(2, dim=1)
        torch.mul(inner, silu, out=d_up)
        d_down = torch.mm(grad.t(), silu.mul_(up))
        torch.ops.aten.silu_backward.grad_input(inner.mul_(up), gate, grad_input=d_gate)
        return torch.mm(d_both, gate_up), torch.mm(d_both.t(), x), d_down


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.rows, ctx.dtype = [len(w) for w in weights], weights[0].dtype
        matrix = weights[0].new_empty(sum(ctx.rows), *weights[0].shape[1:], dtype=dtype)
        for part, weight in zip(matrix.split(ctx.rows), weights, strict=True):
            part.copy_(weight)
        return matrix

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads[0].to(ctx.dtype).split(ctx.rows)

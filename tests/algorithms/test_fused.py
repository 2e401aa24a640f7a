"""Each fused node against the plain formulas under autograd: float32 closely, bfloat16 as far as its rounding goes."""

import pytest
import torch
import torch.nn.functional as F

from speculators.algorithms.fused import joined, rms_norm, swiglu, turned_heads

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def tensors(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_same(fused, plain, inputs, dtype):
    """Equal values and equal gradients of `inputs`; `plain` is what float32 copies of the inputs give."""
    copies = [x.detach().float().requires_grad_() for x in inputs]
    got, wanted = fused(*inputs), plain(*copies)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9)).to(got.dtype)
    grads = [torch.autograd.grad(y, x, upstream.to(y.dtype)) for y, x in ((got, inputs), (wanted, copies))]
    for ours, exact in zip((got, *grads[0]), (wanted, *grads[1]), strict=True):
        scale = exact.abs().max()
        torch.testing.assert_close(ours.float() / scale, exact / scale, atol=TOLERANCE[dtype], rtol=0)


@DTYPES
@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 8)])
def test_rms_norm_and_its_gradients(dtype, shape):
    x, _ = tensors(dtype, shape, (1,))
    (weight,) = tensors(torch.float32, shape[-1:], seed=1)
    assert_same(
        lambda x, w: rms_norm(x, w, 1e-5, dtype), lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-5), [x, weight], dtype
    )


def plain_turn(x, cos, sin):
    R = cos.shape[-1]
    first, second = x[..., : R // 2], x[..., R // 2 : R]
    turned = x[..., :R] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, x[..., R:]], dim=-1)


@DTYPES
@pytest.mark.parametrize("turning", [8, 4])
@pytest.mark.parametrize("normed", [True, False])
def test_turned_heads_and_their_gradients(dtype, turning, normed):
    (x,) = tensors(dtype, (6, 3, 8))
    (weight,) = tensors(torch.float32, (8,), seed=1)
    angle = torch.randn(6, 1, turning // 2, generator=torch.Generator().manual_seed(2))
    cos, sin = (1.2 * torch.cat([f(angle)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    if normed:
        fused = lambda x, w: turned_heads(x, w, 1e-5, cos, sin, dtype)  # noqa: E731
        plain = lambda x, w: plain_turn(F.rms_norm(x, (8,), w, 1e-5), cos, sin)  # noqa: E731
        assert_same(fused, plain, [x, weight], dtype)
    else:
        fused = lambda x: turned_heads(x, None, 1e-5, cos, sin, dtype)  # noqa: E731
        assert_same(fused, lambda x: plain_turn(x, cos, sin), [x], dtype)


@DTYPES
def test_swiglu_and_its_gradients(dtype):
    x, gate, up, down = tensors(dtype, (9, 6), (10, 6), (10, 6), (6, 10))
    assert_same(
        lambda x, gate, up, down: swiglu(x, torch.cat([gate, up]), down),
        lambda x, gate, up, down: (F.silu(x @ gate.T) * (x @ up.T)) @ down.T,
        [x, gate, up, down],
        dtype,
    )


def test_nodes_leave_their_inputs_as_they_were():
    x, weight, gate_up, down = tensors(torch.float32, (9, 6), (6,), (20, 6), (6, 10))
    before = [t.detach().clone() for t in (x, weight, gate_up, down)]
    (rms_norm(x, weight, 1e-5, torch.float32).sum() + swiglu(x, gate_up, down).sum()).backward()
    assert all(torch.equal(a, b) for a, b in zip((x, weight, gate_up, down), before, strict=True))


@DTYPES
def test_joined_weights_are_the_rows_and_give_float32_gradients(dtype):
    one, two = tensors(torch.float32, (3, 4), (2, 4))
    matrix = joined(dtype, one, two)
    assert torch.equal(matrix, torch.cat([one, two]).to(dtype))
    upstream = torch.randn(5, 4, generator=torch.Generator().manual_seed(4)).to(dtype)
    matrix.backward(upstream)
    assert torch.equal(torch.cat([one.grad, two.grad]), upstream.float())

"""The attention over pieces against a slow loop over every query and key, values and gradients."""

import pytest
import torch

from speculators.algorithms import attention
from speculators.algorithms.attention import grouped_attention, visible

K, N, D = 2, 6, 8


def slow_attention(q, k, v, k_own, v_own, start, limit):
    """One query at a time over the keys that the predicate lets it see."""
    G, B, heads, size = q.shape
    T, M = k.shape[0], k_own.shape[1]
    keys, values = torch.cat([k, k_own.flatten(0, 1)]), torch.cat([v, v_own.flatten(0, 1)])
    out = torch.zeros_like(q)
    for g in range(G):
        seen = visible(torch.tensor(g), torch.arange(T + G * M), start, limit, T, M).nonzero()[:, 0]
        for b in range(B):
            for h in range(heads):
                shared = h // (heads // k.shape[1])
                weights = torch.softmax(keys[seen, shared] @ q[g, b, h] * size**-0.5, dim=0)
                out[g, b, h] = weights @ values[seen, shared]
    return out


def inputs(G, B, M, T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(G, B, N, D), (T, K, D), (T, K, D), (G, M, K, D), (G, M, K, D)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


CASES = {
    "blocks of three documents": (5, 4, 4, [0, 0, 7, 7, 12], [3, 6, 7, 11, 14]),
    "chain of one step": (6, 1, 0, [0, 0, 0, 3, 3, 3], [1, 2, 3, 4, 5, 6]),
    "chain of three steps": (6, 1, 2, [0, 0, 0, 3, 3, 3], [1, 2, 3, 4, 5, 6]),
    "a block without context": (2, 3, 3, [0, 4], [0, 4]),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_equal_a_slow_loop_in_values_and_gradients(name):
    G, B, M, start, limit = CASES[name]
    tensors = inputs(G, B, M, T=15)
    start, limit = torch.tensor(start), torch.tensor(limit)
    fast, slow = (attend(*tensors, start, limit) for attend in (grouped_attention, slow_attention))
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(fast.shape, generator=torch.Generator().manual_seed(1))
    used = [t for t in tensors if t.numel()]
    fast_grads = torch.autograd.grad(fast, used, upstream)
    slow_grads = torch.autograd.grad(slow, used, upstream)
    for got, wanted in zip(fast_grads, slow_grads, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_chunks_join_without_a_seam():
    G = 300
    tensors = inputs(G, 1, 1, T=G)
    start = torch.where(torch.arange(G) < 170, 0, 170)
    limit = torch.arange(G) + 1
    torch.testing.assert_close(
        grouped_attention(*tensors, start, limit), slow_attention(*tensors, start, limit), atol=1e-5, rtol=1e-5
    )


def test_a_block_sees_neither_its_anchor_row_nor_later_context_nor_another_block():
    start, limit, T, M = torch.tensor([0, 0, 4]), torch.tensor([1, 3, 6]), 8, 2
    seen = visible(torch.arange(3)[:, None], torch.arange(T + 3 * M), start, limit, T, M)
    assert seen.nonzero().tolist() == [
        *[[0, k] for k in (0, 8, 9)],
        *[[1, k] for k in (0, 1, 2, 10, 11)],
        *[[2, k] for k in (4, 5, 12, 13)],
    ]


@pytest.mark.parametrize("name", CASES)
def test_flex_attention_has_the_same_mask_and_layout(name, monkeypatch):
    """Its forward pass runs on CPUs too, uncompiled; so what a GPU would compute is compared here."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    G, B, M, start, limit = CASES[name]
    start, limit = torch.tensor(start), torch.tensor(limit)
    tensors = [t.detach() for t in inputs(G, B, M, T=15)]
    pieces = grouped_attention(*tensors, start, limit)
    torch.testing.assert_close(attention._flex(*tensors, start, limit), pieces, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_flex_attention_equals_the_pieces_in_values_and_gradients(name):
    G, B, M, start, limit = CASES[name]
    start, limit = torch.tensor(start), torch.tensor(limit)
    on_cpu = inputs(G, B, M, T=15)
    on_gpu = [t.detach().cuda().requires_grad_() for t in on_cpu]
    pieces = grouped_attention(*on_cpu, start, limit)
    flex = grouped_attention(*on_gpu, start.cuda(), limit.cuda())
    torch.testing.assert_close(flex.cpu(), pieces, atol=1e-3, rtol=1e-3)
    pieces.sum().backward()
    flex.sum().backward()
    for got, wanted in zip(on_gpu, on_cpu, strict=True):
        if wanted.numel():
            torch.testing.assert_close(got.grad.cpu(), wanted.grad, atol=1e-3, rtol=1e-3)

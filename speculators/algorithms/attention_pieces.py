"""The execution of `attention.grouped_attention` away from GPUs: plain matrix products over runs of groups.

A run's keys are the context rows that any of its groups sees and then the own keys of all of them, under a mask, so one
softmax covers both. It is made again in the backward pass, so that nothing of size queries x keys is kept; its memory
is used again for each run. Shapes as in `attention`; x queries x heads of a run.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Queries x heads that share one product; small enough for scores to stay in cache, large enough for the matrix unit.
_CHUNK_QUERIES = 384
# Context rows of a product come in multiples of this: oneDNN prepares a product anew for every shape it has not met.
_CONTEXT_MULTIPLE = 128


def visible(
    group: Tensor,
    key: Tensor,
    start: Tensor,
    limit: Tensor,
    num_context: int,
    own: int,
    query: Tensor | int = 0,
    window: int | None = None,
) -> Tensor:
    """THE predicate: whether queries of `group` see `key`; keys are the T context rows, then the G x M own keys.

    Args:
        group, key: integer tensors that broadcast against each other.
        start, limit: int64 [G], the context range of each group.
        num_context: T.
        own: M.
        query: number of the query in its group, 0 .. B - 1; matters with a window only.
        window: W, or None for the whole context.
    """
    in_context = (key < num_context) & (key >= start[group]) & (key < limit[group])
    if window is not None:
        in_context = in_context & (key > limit[group] + query - window)
    is_own = (key >= num_context) & ((key - num_context) // max(own, 1) == group)
    return in_context | is_own


def _chunks(start_G: Tensor, limit_G: Tensor, queries: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Runs of groups: (first group, end group, first context row, end context row).

    All runs but the last have the same number of groups, whatever documents they belong to. The end may lie behind the
    last row that any of its groups sees, by less than `_CONTEXT_MULTIPLE`.
    """
    starts, limits = start_G.tolist(), limit_G.tolist()
    size = max(1, _CHUNK_QUERIES // queries)
    for first in range(0, len(starts), size):
        run = range(first, min(first + size, len(starts)))
        low = min(starts[g] if window is None else max(starts[g], limits[g] - window + 1) for g in run)
        width = max(0, max(limits[g] for g in run) - low)
        yield first, run.stop, low, low + width + -width % _CONTEXT_MULTIPLE


def _spare_rows(x_TKD: Tensor) -> Tensor:
    """[K, T + spare, D], contiguous, the last rows zero: the widest run of rows may end there. The mask hides them."""
    T, K, D = x_TKD.shape
    padded = x_TKD.new_zeros(K, T + _CONTEXT_MULTIPLE, D)
    padded[:, :T] = x_TKD.transpose(0, 1)
    return padded


def _by_kv_head(q_GBND: Tensor, num_kv_heads: int) -> Tensor:
    """[G, B, N, D] -> [K, G B R, D], contiguous: the queries that share a key/value head side by side."""
    G, B, N, D = q_GBND.shape
    grouped = q_GBND.view(G, B, num_kv_heads, N // num_kv_heads, D)
    return grouped.permute(2, 0, 1, 3, 4).reshape(num_kv_heads, -1, D)


def _from_kv_head(x_KXD: Tensor, G: int, B: int) -> Tensor:
    """The inverse of `_by_kv_head`."""
    K, _, D = x_KXD.shape
    return x_KXD.view(K, G, B, -1, D).permute(1, 2, 0, 3, 4).reshape(G, B, -1, D)


class _Run(NamedTuple):
    """One run of groups: its queries, its keys and values (context rows, then the own keys of all its groups), and 0
    or -inf for what each query of a group sees [g, B or 1, keys]."""

    queries: slice
    own: slice
    context: slice
    keys: Tensor
    values: Tensor
    mask: Tensor

    @property
    def width(self) -> int:
        """Context rows among the keys."""
        return self.context.stop - self.context.start


class _Layout(NamedTuple):
    """Queries [K, G B R, D], context [K, T + spare, D], own keys and values [K, G M, D], and the groups' ranges."""

    q: Tensor
    kc: Tensor
    vc: Tensor
    ko: Tensor
    vo: Tensor
    start: Tensor
    limit: Tensor

    def room(self, window: int | None) -> Tensor:
        """Uninitialised memory for the scores of the largest run; runs use it one after the other."""
        G = len(self.limit)
        K, X, _ = self.q.shape
        M = self.ko.shape[1] // G
        chunks = _chunks(self.start, self.limit, X // G, window)
        return self.q.new_empty(max(K * X // G * (b - a) * (high - low + (b - a) * M) for a, b, low, high in chunks))

    def runs(self, B: int, window: int | None) -> Iterator[_Run]:
        """Run after run, keys and mask made on the way."""
        G = len(self.limit)
        Q, M = self.q.shape[1] // G, self.ko.shape[1] // G
        for a, b, low, high in _chunks(self.start, self.limit, Q, window):
            context, own = slice(low, high), slice(a * M, b * M)
            keys, values = self.kc[:, context], self.vc[:, context]
            if M:
                keys, values = (torch.cat(x, dim=1) for x in ((keys, self.ko[:, own]), (values, self.vo[:, own])))
            group, query = torch.arange(a, b)[:, None, None], torch.arange(B if window else 1)[:, None]
            # The own keys of this run are those that `visible` numbers from T + a M on.
            T = self.kc.shape[1]
            key = torch.cat([torch.arange(low, high), torch.arange(T + a * M, T + b * M)])
            seen = visible(group, key, self.start, self.limit, T, M, query, window)
            mask = torch.zeros(seen.shape, dtype=self.q.dtype).masked_fill_(~seen, float("-inf"))
            yield _Run(slice(a * Q, b * Q), own, context, keys, values, mask)


def _in(room: Tensor, q_KxD: Tensor, run: _Run) -> Tensor:
    """[K, x, keys] at the beginning of `room`."""
    shape = (*q_KxD.shape[:2], run.keys.shape[1])
    return room[: math.prod(shape)].view(shape)


def _probabilities(q_KxD: Tensor, run: _Run, room: Tensor) -> Tensor:
    """[K, x, keys] in `room`: the softmax over what each query sees, in the dtype of the products."""
    D = q_KxD.shape[-1]
    g, b, keys = run.mask.shape
    scores = _in(room, q_KxD, run)
    scores.view(len(scores), g, b, -1, keys).copy_(run.mask[:, :, None])
    scores.baddbmm_(q_KxD, run.keys.transpose(1, 2), alpha=D**-0.5)
    probabilities: Tensor = torch.ops.aten._softmax.out(scores, -1, False, out=scores)
    return probabilities


class Pieces(torch.autograd.Function):
    """Softmax attention, and its gradient dS = P (dP - sum(P dP))."""

    @staticmethod
    def forward(ctx, q, k_context, v_context, k_own, v_own, start, limit, window):  # type: ignore[no-untyped-def]
        G, B = q.shape[:2]
        kc, vc = (_spare_rows(x) for x in (k_context, v_context))
        ko, vo = (x.flatten(0, 1).transpose(0, 1).contiguous() for x in (k_own, v_own))
        layout = _Layout(_by_kv_head(q, len(kc)), kc, vc, ko, vo, start, limit)
        out = torch.empty_like(layout.q)
        room = layout.room(window)
        for run in layout.runs(B, window):
            p = _probabilities(layout.q[:, run.queries], run, room)
            out[:, run.queries] = torch.bmm(p, run.values)
        ctx.save_for_backward(*layout)
        ctx.B, ctx.window = B, window
        return _from_kv_head(out, G, B)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        layout = _Layout(*ctx.saved_tensors)
        G, B = grad.shape[:2]
        d_out = _by_kv_head(grad.to(layout.q.dtype), layout.kc.shape[0])
        dq, dko, dvo = (torch.empty_like(x) for x in (layout.q, layout.ko, layout.vo))
        dkc, dvc = (torch.zeros(x.shape, dtype=torch.float32) for x in (layout.kc, layout.vc))
        rooms = layout.room(ctx.window), layout.room(ctx.window)
        for run in layout.runs(B, ctx.window):
            q, do = layout.q[:, run.queries], d_out[:, run.queries]
            p = _probabilities(q, run, rooms[0])
            dp = torch.bmm(do, run.values.transpose(1, 2), out=_in(rooms[1], q, run))
            dv = torch.bmm(p.transpose(1, 2), do)
            ds = torch.ops.aten._softmax_backward_data.out(dp, p, -1, p.dtype, grad_input=dp)
            dq[:, run.queries] = torch.bmm(ds, run.keys)
            dk = torch.bmm(ds.transpose(1, 2), q)
            for context, own, gradient in ((dkc, dko, dk), (dvc, dvo, dv)):
                context[:, run.context] += gradient[:, : run.width]
                own[:, run.own] = gradient[:, run.width :]
        scale = q.shape[-1] ** -0.5
        dkc, dko = dkc.mul_(scale), dko.mul_(scale)
        context_grads = [x[:, :-_CONTEXT_MULTIPLE].transpose(0, 1).to(q.dtype) for x in (dkc, dvc)]
        own_grads = [x.transpose(0, 1).unflatten(0, (G, -1)) for x in (dko, dvo)]
        return _from_kv_head(dq.mul_(scale), G, B), *context_grads, *own_grads, None, None, None

"""Attention of draft queries over a context prefix and their own few keys: one predicate, two executions.

A *group* is B queries that see the same keys: context positions `start <= s < limit`, and the group's own M keys.
For dflash a group is a block (B = M = block_size, limit = its anchor); for eagle3 it is a slot of the unrolled chain
(B = 1, M = the chain's own steps so far, limit = slot + 1). On CUDA this is FlexAttention with a block mask; elsewhere
plain matrix products over exactly those pieces, joined in one softmax and recomputed in the backward pass, so that
nothing of size queries x keys is kept. With a sliding window of W, query b of a group stands at row limit + b (a block
starts at its anchor) and sees context only from row limit + b - W + 1 on; its own keys stay visible in both directions.

Shapes: G groups, B queries and M own keys a group, T context rows, N heads, K key/value heads, R = N / K, D head size.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

# Queries x heads that share one product; small enough for scores to stay in cache, large enough for the matrix unit.
_CHUNK_QUERIES = 128
# Context rows of a product come in multiples of this: oneDNN prepares a product anew for every shape it has not met.
_CONTEXT_MULTIPLE = 64


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


def grouped_attention(
    q_GBND: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    k_GMKD: Tensor,
    v_GMKD: Tensor,
    start_G: Tensor,
    limit_G: Tensor,
    window: int | None = None,
) -> Tensor:
    """Softmax attention of each group's queries over its context range and its own keys; returns [G, B, N, D].

    Groups must be sorted so that `start` does not decrease and, for equal `start`, neither does `limit` (documents in
    order, early anchors first). Scores are scaled by D ** -0.5. M may be 0, but each query must see at least one key.
    """
    device = q_GBND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q_GBND.dtype
    q, k, v, k_own, v_own = (t.to(dtype) for t in (q_GBND, k_TKD, v_TKD, k_GMKD, v_GMKD))
    attend = _flex if device == "cuda" else _Pieces.apply
    with torch.autocast(device, enabled=False):
        out: Tensor = attend(q, k, v, k_own, v_own, start_G, limit_G, window)
    return out


def _chunks(start_G: Tensor, limit_G: Tensor, queries: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Runs of groups of one document: (first group, end group, first context row, end context row).

    The end may lie behind the last row that any of its groups sees, by less than `_CONTEXT_MULTIPLE`.
    """
    starts, limits = start_G.tolist(), limit_G.tolist()
    size = max(1, _CHUNK_QUERIES // queries)
    first = 0
    for g in range(1, len(starts) + 1):
        if g == len(starts) or starts[g] != starts[first] or g - first == size:
            low, high = starts[first], max(limits[first:g])
            if window is not None:
                low = max(low, min(limits[first:g]) - window + 1)
            width = max(0, high - low)
            yield first, g, low, low + width + -width % _CONTEXT_MULTIPLE
            first = g


def _spare_rows(x_KTD: Tensor) -> Tensor:
    """Zero rows after the last one, contiguous: the widest run of rows may end there. The mask hides them."""
    return torch.nn.functional.pad(x_KTD, (0, 0, 0, _CONTEXT_MULTIPLE)).contiguous()


def _by_kv_head(q_GBND: Tensor, num_kv_heads: int) -> Tensor:
    """[G, B, N, D] -> [K, G, B R, D], contiguous: the queries that share a key/value head side by side."""
    G, B, N, D = q_GBND.shape
    grouped = q_GBND.view(G, B, num_kv_heads, N // num_kv_heads, D)
    return grouped.permute(2, 0, 1, 3, 4).reshape(num_kv_heads, G, B * (N // num_kv_heads), D)


def _from_kv_head(x_KGQD: Tensor, B: int) -> Tensor:
    """The inverse of `_by_kv_head`."""
    K, G, Q, D = x_KGQD.shape
    return x_KGQD.view(K, G, B, Q // B, D).permute(1, 2, 0, 3, 4).reshape(G, B, K * (Q // B), D)


def _scores(
    q_KgQD: Tensor, k_KcD: Tensor, k_KgMD: Tensor, low: int, limit_g: Tensor, B: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Masked, scaled scores of one chunk, float32: over the context [K, g, Q, c] and over the own keys [K, g, Q, M]."""
    K, g, Q, D = q_KgQD.shape
    context = (
        torch.bmm(q_KgQD.reshape(K, g * Q, D), k_KcD.transpose(1, 2))
        .view(K, g, Q, k_KcD.shape[1])
        .float()
        .mul_(D**-0.5)
    )
    row = torch.arange(low, low + k_KcD.shape[1])
    hidden = row >= limit_g[:, None]
    context.masked_fill_(hidden[None, :, None, :], float("-inf"))
    if window is not None:
        query = torch.arange(Q) // (Q // B)
        too_early = row <= (limit_g[:, None] + query - window)[..., None]
        context.masked_fill_(too_early[None], float("-inf"))
    own = torch.matmul(q_KgQD.float(), k_KgMD.float().transpose(2, 3)).mul_(D**-0.5)
    return context, own


class _Pieces(torch.autograd.Function):
    """`grouped_attention` in chunks of groups: softmax attention, and its gradient dS = P (dP - sum(dO O))."""

    @staticmethod
    def forward(ctx, q, k_context, v_context, k_own, v_own, start, limit, window):  # type: ignore[no-untyped-def]
        _, B, N, _ = q.shape
        K = k_context.shape[1]
        q_KGQD = _by_kv_head(q, K)
        kc_KTD, vc_KTD = (_spare_rows(x.transpose(0, 1)) for x in (k_context, v_context))
        ko_KGMD, vo_KGMD = (x.permute(2, 0, 1, 3).contiguous() for x in (k_own, v_own))
        out_KGQD = torch.empty_like(q_KGQD)
        lse_KGQ = torch.empty(q_KGQD.shape[:3], dtype=torch.float32)
        for a, b, low, high in _chunks(start, limit, B * N // K, window):
            q_c = q_KGQD[:, a:b].contiguous()
            context, own = _scores(q_c, kc_KTD[:, low:high], ko_KGMD[:, a:b], low, limit[a:b], B, window)
            scores = torch.cat([context, own], dim=-1)
            lse = torch.logsumexp(scores, dim=-1)
            p = scores.sub_(lse[..., None]).exp_()
            p_context, p_own = p[..., : high - low], p[..., high - low :]
            flat = p_context.reshape(K, q_c.shape[1] * q_c.shape[2], high - low).to(q.dtype)
            mixed = torch.bmm(flat, vc_KTD[:, low:high]).view(q_c.shape).float()
            out_KGQD[:, a:b] = mixed.add_(torch.matmul(p_own, vo_KGMD[:, a:b].float())).to(q.dtype)
            lse_KGQ[:, a:b] = lse
        ctx.save_for_backward(q_KGQD, kc_KTD, vc_KTD, ko_KGMD, vo_KGMD, out_KGQD, lse_KGQ, start, limit)
        ctx.B, ctx.window = B, window
        return _from_kv_head(out_KGQD, B)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, kc, vc, ko, vo, out, lse, start, limit = ctx.saved_tensors
        K, _, Q, D = q.shape
        d_out = _by_kv_head(grad.to(q.dtype), K)
        delta = (d_out.float() * out.float()).sum(-1, keepdim=True)
        dq = torch.empty_like(q)
        dkc, dvc = torch.zeros(kc.shape), torch.zeros(vc.shape)
        dko, dvo = torch.empty_like(ko), torch.empty_like(vo)
        for a, b, low, high in _chunks(start, limit, Q, ctx.window):
            g, c = b - a, high - low
            q_c, do_c = q[:, a:b].contiguous(), d_out[:, a:b].contiguous()
            q_flat, do_flat = q_c.view(K, g * Q, D), do_c.view(K, g * Q, D)
            context, own = _scores(q_c, kc[:, low:high], ko[:, a:b], low, limit[a:b], ctx.B, ctx.window)
            p_context = context.sub_(lse[:, a:b, :, None]).exp_()
            p_own = own.sub_(lse[:, a:b, :, None]).exp_()
            dp_context = torch.bmm(do_flat, vc[:, low:high].transpose(1, 2)).view(K, g, Q, c).float()
            dp_own = torch.matmul(do_c.float(), vo[:, a:b].float().transpose(2, 3))
            ds_own = p_own * (dp_own - delta[:, a:b]) * D**-0.5
            p_flat = p_context.view(K, g * Q, c).to(q.dtype)
            dvc[:, low:high] += torch.bmm(p_flat.transpose(1, 2), do_flat)
            ds_flat = dp_context.sub_(delta[:, a:b]).mul_(p_context).mul_(D**-0.5).view(K, g * Q, c).to(q.dtype)
            dq_c = torch.bmm(ds_flat, kc[:, low:high]).view(K, g, Q, D).float()
            dq[:, a:b] = dq_c.add_(torch.matmul(ds_own, ko[:, a:b].float())).to(q.dtype)
            dkc[:, low:high] += torch.bmm(ds_flat.transpose(1, 2), q_flat)
            dko[:, a:b] = torch.matmul(ds_own.transpose(2, 3), q_c.float()).to(q.dtype)
            dvo[:, a:b] = torch.matmul(p_own.transpose(2, 3), do_c.float()).to(q.dtype)
        context_grads = [x[:, :-_CONTEXT_MULTIPLE].transpose(0, 1).to(q.dtype) for x in (dkc, dvc)]
        own_grads = [x.permute(1, 2, 0, 3) for x in (dko, dvo)]
        return _from_kv_head(dq, ctx.B), *context_grads, *own_grads, None, None, None


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _flex(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_own: Tensor,
    v_own: Tensor,
    start: Tensor,
    limit: Tensor,
    window: int | None = None,
) -> Tensor:
    """The same as one FlexAttention call over [context rows, all own keys] under the block mask of `visible`."""
    from torch.nn.attention.flex_attention import create_block_mask

    G, B, N, D = q.shape
    T, M = k_context.shape[0], k_own.shape[1]

    def mask(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(query // B, key, start, limit, T, M, query % B, window)

    block_mask = create_block_mask(mask, None, None, G * B, T + G * M, device=q.device)
    keys = torch.cat([k_context, k_own.flatten(0, 1)]).transpose(0, 1)[None]
    values = torch.cat([v_context, v_own.flatten(0, 1)]).transpose(0, 1)[None]
    queries = q.flatten(0, 1).transpose(0, 1)[None]
    out = _compiled_flex()(queries, keys, values, block_mask=block_mask, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(G, B, N, D)

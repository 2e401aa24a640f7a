"""Attention of draft queries over a context prefix and their own few keys: one predicate, two executions.

A *group* is B queries that see the same keys: context positions `start <= s < limit`, and the group's own M keys.
For dflash a group is a block (B = M = block_size, limit = its anchor); for eagle3 it is a slot of the unrolled chain
(B = 1, M = the chain's own steps so far, limit = slot + 1). On CUDA this is FlexAttention with a block mask; elsewhere
plain matrix products over exactly those pieces, joined in one softmax and recomputed in the backward pass, so that
nothing of size queries x keys is kept. With a sliding window of W, query b of a group stands at row limit + b (a block
starts at its anchor) and sees context only from row limit + b - W + 1 on; its own keys stay visible in both directions.

Shapes: G groups, B queries and M own keys a group, T context rows, N heads, K key/value heads, R = N / K, D head size.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from speculators.algorithms.attention_pieces import Pieces, visible

__all__ = ["grouped_attention", "visible"]


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
    attend = _flex if device == "cuda" else Pieces.apply
    with torch.autocast(device, enabled=False):
        out: Tensor = attend(q, k, v, k_own, v_own, start_G, limit_G, window)
    return out


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

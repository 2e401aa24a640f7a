"""Building blocks that both drafts use, with submodule names equal to the tensor names that vLLM loads.

Shapes: X rows of any kind, H hidden, N query heads, K key/value heads, D head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculators.algorithms.draft_config import DraftConfig
from speculators.algorithms.fused import joined, rms_norm, swiglu, turned_heads


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32. `weight` starts at one.

    Under autocast the result has the products' dtype, so that it is cast once and not for each layer that reads it.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, product_dtype(x))


def product_dtype(x: Tensor) -> torch.dtype:
    """What matrix products on the device of `x` run in now."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


def linear_input(x: Tensor) -> Tensor:
    """Stored bfloat16 features as linear layers take them: untouched under autocast, float32 elsewhere."""
    return x if torch.is_autocast_enabled(x.device.type) else x.float()


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def products(self, dtype: torch.dtype) -> "MLPProducts":
        """The matrices as products take them; made once a step, however often they are used."""
        return MLPProducts(
            joined(dtype, self.gate_proj.weight, self.up_proj.weight), joined(dtype, self.down_proj.weight)
        )

    def forward(self, x_XH: Tensor, products: "MLPProducts") -> Tensor:
        return swiglu(x_XH, *products)


class MLPProducts(NamedTuple):
    """gate's rows and then up's [2 I, H], and down [H, I]."""

    gate_up: Tensor
    down: Tensor


class Projections(nn.Module):
    """q, k, v and o projections with an optional norm of each query and key head (Qwen3's q_norm and k_norm)."""

    def __init__(self, config: DraftConfig, input_size: int, head_norms: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        if head_norms:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.head_norms = head_norms

    def products(self, dtype: torch.dtype) -> "AttentionProducts":
        """The matrices as products take them; made once a step, however often they are used."""
        return AttentionProducts(
            joined(dtype, self.q_proj.weight),
            joined(dtype, self.k_proj.weight, self.v_proj.weight),
            joined(dtype, self.o_proj.weight),
        )

    def query(self, x_XI: Tensor, rotary: "RotaryRows", products: "AttentionProducts") -> Tensor:
        """[X, N, D], normed and rotated."""
        q = F.linear(x_XI, products.q).unflatten(-1, (-1, self.head_dim))
        return rotary.apply(q, self.q_norm if self.head_norms else None)

    def key_value(self, x_XI: Tensor, rotary: "RotaryRows", products: "AttentionProducts") -> tuple[Tensor, Tensor]:
        """Keys (normed and rotated) and values, each [X, K, D]."""
        k, v = F.linear(x_XI, products.kv).unflatten(-1, (-1, self.head_dim)).chunk(2, dim=1)
        return rotary.apply(k, self.k_norm if self.head_norms else None), v


class AttentionProducts(NamedTuple):
    """q [N D, I], k's rows and then v's [2 K D, I], o [H, N D]."""

    q: Tensor
    kv: Tensor
    o: Tensor


class Rotary(nn.Module):
    """Rotary tables for the kinds of `rope_parameters` in `rotary.SHARED_TYPES`; half-split ("neox") layout, as vLLM
    applies it to drafts. With a `partial_rotary_factor` only the first part of a head turns."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope = dict(config.rope_parameters)
        if rope["rope_type"] == "default" and "partial_rotary_factor" in rope:
            rope |= {"rope_type": "linear", "factor": 1.0}  # the same, but Llama's default kind turns whole heads
        self._rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                rope_parameters=rope,
                max_position_embeddings=config.max_position_embeddings,
            )
        )

    def rows(self, positions_X: Tensor) -> "RotaryRows":
        """The tables at these positions."""
        with torch.no_grad():
            cos, sin = self._rotary(torch.empty((), device=positions_X.device), positions_X[None])
        return RotaryRows(cos[0, :, None], sin[0, :, None])


class RotaryRows:
    """cos and sin at given positions, each float32 [X, 1, R]; R is D, or less of heads that turn in part."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def apply(self, x_XND: Tensor, norm: RMSNorm | None) -> Tensor:
        """Norm each head of each row, if there is a norm, and rotate the first R entries of it."""
        weight, eps = (norm.weight, norm.eps) if norm else (None, 0.0)
        return turned_heads(x_XND, weight, eps, self.cos, self.sin, product_dtype(x_XND))

    def __getitem__(self, rows: Tensor) -> "RotaryRows":
        return RotaryRows(self.cos[rows], self.sin[rows])

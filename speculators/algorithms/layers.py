"""Building blocks that both drafts use, with submodule names equal to the tensor names that vLLM loads.

Shapes: X rows of any kind, H hidden, N query heads, K key/value heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculators.algorithms.draft_config import DraftConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32. `weight` starts at one.

    Under autocast the result has the products' dtype, so that it is cast once and not for each layer that reads it.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps)
        device = x.device.type
        return normed.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else normed


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

    def forward(self, x_XH: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_XH)) * self.up_proj(x_XH))


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

    def query(self, x_XI: Tensor, rotary: "RotaryRows") -> Tensor:
        """[X, N, D], normed and rotated."""
        q = self.q_proj(x_XI).unflatten(-1, (-1, self.head_dim))
        return rotary.apply(self.q_norm(q) if self.head_norms else q)

    def key_value(self, x_XI: Tensor, rotary: "RotaryRows") -> tuple[Tensor, Tensor]:
        """Keys (normed and rotated) and values, each [X, K, D]."""
        k = self.k_proj(x_XI).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x_XI).unflatten(-1, (-1, self.head_dim))
        return rotary.apply(self.k_norm(k) if self.head_norms else k), v


class Rotary(nn.Module):
    """Rotary tables for any `rope_parameters` that transformers knows (default, llama3, yarn, linear, ...); half-split
    ("neox") layout, as vLLM applies it to drafts."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self._rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                rope_parameters=dict(config.rope_parameters),
                max_position_embeddings=config.max_position_embeddings,
            )
        )

    def rows(self, positions_X: Tensor) -> "RotaryRows":
        """The tables at these positions."""
        with torch.no_grad():
            cos, sin = self._rotary(torch.empty((), device=positions_X.device), positions_X[None])
        return RotaryRows(cos[0, :, None], sin[0, :, None])


class RotaryRows:
    """cos and sin at given positions, each float32 [X, 1, D]."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def apply(self, x_XND: Tensor) -> Tensor:
        """Rotate each head of each row."""
        first, second = x_XND.chunk(2, dim=-1)
        return x_XND * self.cos + torch.cat([-second, first], dim=-1) * self.sin

    def __getitem__(self, rows: Tensor) -> "RotaryRows":
        return RotaryRows(self.cos[rows], self.sin[rows])

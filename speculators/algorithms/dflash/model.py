"""The dflash network: Qwen3-style layers whose blocks see injected context keys and values before the anchor.

Every layer projects the same context stream, hidden_norm(fc(features)), to keys and values (vLLM,
`precompute_and_store_context_kv`); a block's slot 0 holds the anchor token, the others the mask token; slots see the
whole block in both directions and context strictly before the anchor (with a sliding window, its last part).

Shapes: T context rows, A anchors (blocks), B slots a block, H hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculators.algorithms.attention import grouped_attention
from speculators.algorithms.dflash.config import DFlashConfig
from speculators.algorithms.layers import MLP, Projections, RMSNorm, Rotary, RotaryRows, linear_input


class Layer(nn.Module):
    """A decoder layer over block slots."""

    def __init__(self, config: DFlashConfig, number: int) -> None:
        super().__init__()
        self.window = config.window_of(number)
        self.self_attn = Projections(config, config.hidden_size, head_norms=True)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        stream_XH: Tensor,
        context_TH: Tensor,
        context_rotary: RotaryRows,
        rotary: RotaryRows,
        start_A: Tensor,
        anchor_A: Tensor,
    ) -> Tensor:
        """The residual stream [A x B, H] after this layer."""
        blocks = (len(anchor_A), -1)
        x = self.input_layernorm(stream_XH)
        products = self.self_attn.products(x.dtype)
        context = self.self_attn.key_value(context_TH, context_rotary, products)
        q = self.self_attn.query(x, rotary, products).unflatten(0, blocks)
        k_own, v_own = (t.unflatten(0, blocks) for t in self.self_attn.key_value(x, rotary, products))
        attended = grouped_attention(q, *context, k_own, v_own, start_A, anchor_A, self.window)
        stream_XH = stream_XH + F.linear(attended.flatten(0, 1).flatten(1), products.o)
        return stream_XH + self.mlp(self.post_attention_layernorm(stream_XH), self.mlp.products(x.dtype))


class DFlashModel(nn.Module):
    """The trained part. Embedding and output rows are the verifier's, frozen, and live outside."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        H = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.aux_layer_ids) * H, H, bias=False)
        self.hidden_norm = RMSNorm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_layers))
        self.norm = RMSNorm(H, config.rms_norm_eps)
        self.rotary = Rotary(config)
        if config.learn_mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(H))

    def forward(
        self, aux_TAH: Tensor, positions_T: Tensor, embeds_ABH: Tensor, start_A: Tensor, anchor_A: Tensor
    ) -> Tensor:
        """[A, B, H], after the final norm. `anchor_A`: sorted rows; `start_A`: first rows of their documents."""
        context_TH = self.hidden_norm(self.fc(linear_input(aux_TAH.flatten(1))))
        A, B, _ = embeds_ABH.shape
        context_rotary = self.rotary.rows(positions_T)
        slots = torch.arange(B, device=anchor_A.device)
        rotary = self.rotary.rows((positions_T[anchor_A][:, None] + slots).flatten())
        if self.config.learn_mask_embedding:
            masks = self.mask_embedding.expand(A, B - 1, -1)
            embeds_ABH = torch.cat([embeds_ABH[:, :1].float(), masks], dim=1)
        stream = embeds_ABH.flatten(0, 1).float()
        for layer in self.layers:
            stream = layer(stream, context_TH, context_rotary, rotary, start_A, anchor_A)
        return self.norm(stream).unflatten(0, (A, B))

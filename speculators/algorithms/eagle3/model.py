"""The eagle3 network: fc over the verifier's features, then Llama layers, the first of which reads [embedding, hidden].

Alignment (vLLM, v1/spec_decode): slot t holds the embedding of token t + 1 and the feature of position t, rotates at
position t, and predicts token t + 2. Step j of the chain from slot t has the embedding of token t + 1 + j, the chain's
own output as its hidden state, position t + j, and sees slots <= t of the first step and its own earlier steps.

Shapes: T slots of the row, S selected slots (those with a supervised target), H hidden, A verifier features a position.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculators.algorithms.attention import grouped_attention
from speculators.algorithms.eagle3.config import Eagle3Config
from speculators.algorithms.layers import (
    MLP,
    AttentionProducts,
    MLPProducts,
    Projections,
    RMSNorm,
    Rotary,
    RotaryRows,
    linear_input,
)


class Slots(NamedTuple):
    """Some slots of a row: their indices, the first slot of their document, and the rotary rows of the current step."""

    index: Tensor
    start: Tensor
    rotary: RotaryRows


class Layer(nn.Module):
    """A decoder layer; layer 0 takes [embedding, hidden] and normalises both on its own, the others only hidden."""

    def __init__(self, config: Eagle3Config, number: int) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.first = number == 0
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Projections(config, 2 * H if self.first else H, config.head_norms)
        self.mlp = MLP(config)
        if self.first:
            self.hidden_norm = RMSNorm(H, eps)
        self.input_layernorm = RMSNorm(H, eps)
        self.post_attention_layernorm = RMSNorm(H, eps)

    def inputs(self, embeds_XH: Tensor, hidden_XH: Tensor) -> tuple[Tensor, Tensor]:
        """What the projections read ([X, 2H] in layer 0), and the residual stream."""
        if not self.first:
            return self.input_layernorm(hidden_XH), hidden_XH
        normed = self.hidden_norm(hidden_XH)
        residual = normed if self.norm_before_residual else hidden_XH
        return torch.cat([self.input_layernorm(embeds_XH), normed], dim=-1), residual

    def products(self, dtype: torch.dtype) -> "Products":
        """The layer's matrices for all steps of a row."""
        return Products(self.self_attn.products(dtype), self.mlp.products(dtype))

    def finish(self, attended_XA: Tensor, residual_XH: Tensor, products: "Products") -> Tensor:
        """Everything after attention; returns the residual stream."""
        residual_XH = residual_XH + F.linear(attended_XA, products.attention.o)
        return residual_XH + self.mlp(self.post_attention_layernorm(residual_XH), products.mlp)


class Products(NamedTuple):
    """A layer's matrices in the dtype of the products."""

    attention: AttentionProducts
    mlp: MLPProducts


class Eagle3Model(nn.Module):
    """The trained part. Embedding and output rows are the verifier's, frozen, and live outside."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        H, A, eps = config.hidden_size, len(config.aux_layer_ids), config.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(A * H, H, bias=False)
        self.layers = nn.ModuleList(Layer(config, n) for n in range(config.num_layers))
        self.norm = RMSNorm(H, eps)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(A * H, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(H, eps) for _ in range(A))
        self.rotary = Rotary(config)

    def features(self, aux_TAH: Tensor) -> Tensor:
        """[T, H]: the verifier's features joined by fc. With both norms, the one over all features comes first."""
        flat = aux_TAH.flatten(1)
        if self.config.norm_before_fc:
            flat = self.input_norm(flat)
        if self.config.fc_norm:
            parts = flat.unflatten(1, (len(self.fc_norm), -1)).unbind(1)
            flat = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=1)
        return self.fc(linear_input(flat))

    def first_step(
        self, embeds_TH: Tensor, hidden_TH: Tensor, slots: Slots, all_slots: Slots
    ) -> tuple[Tensor, "Chain"]:
        """Step 0. Keys and values are made for every slot; the last layer answers only for the selected ones.

        Returns the residual stream [S, H] of the selected slots, and the chain that further steps extend.
        """
        context, products = [], []
        hidden = hidden_TH
        for number, layer in enumerate(self.layers):
            x, residual = layer.inputs(embeds_TH, hidden)
            matrices = layer.products(x.dtype)
            products.append(matrices)
            k, v = layer.self_attn.key_value(x, all_slots.rotary, matrices.attention)
            context.append((k, v))
            asked = slots if number == len(self.layers) - 1 else all_slots
            if asked is slots:
                x, residual = x.index_select(0, slots.index), residual.index_select(0, slots.index)
            q = layer.self_attn.query(x, asked.rotary, matrices.attention)
            none = k.new_zeros(len(q), 0, *k.shape[1:])
            attended = grouped_attention(q[:, None], k, v, none, none, asked.start, asked.index + 1)
            hidden = layer.finish(attended.flatten(1), residual, matrices)
        return hidden, Chain(context, [[] for _ in self.layers], products)

    def next_step(self, embeds_SH: Tensor, hidden_SH: Tensor, slots: Slots, chain: "Chain") -> Tensor:
        """One more step of every selected slot's chain; returns the residual stream [S, H]."""
        hidden = hidden_SH
        for layer, (k_context, v_context), own, products in zip(self.layers, *chain, strict=True):
            x, residual = layer.inputs(embeds_SH, hidden)
            own.append(layer.self_attn.key_value(x, slots.rotary, products.attention))
            k_own, v_own = (torch.stack(parts, dim=1) for parts in zip(*own, strict=True))
            q = layer.self_attn.query(x, slots.rotary, products.attention)
            attended = grouped_attention(q[:, None], k_context, v_context, k_own, v_own, slots.start, slots.index + 1)
            hidden = layer.finish(attended.flatten(1), residual, products)
        return hidden

    def feedback(self, stream_SH: Tensor) -> tuple[Tensor, Tensor]:
        """(what the output rows read, what the next step takes as its hidden state), each [S, H]."""
        normed = self.norm(stream_SH)
        return normed, normed if self.config.norm_output else stream_SH


class Chain(NamedTuple):
    """By layer: keys and values of step 0 for every slot, those of the later steps for the selected slots, and the
    layer's matrices."""

    context: list[tuple[Tensor, Tensor]]
    own: list[list[tuple[Tensor, Tensor]]]
    products: list[Products]

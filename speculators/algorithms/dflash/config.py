"""The dflash draft's config: keys and tensors as vLLM's `qwen3_dflash.py` loads them. No torch here.

The trap: vLLM sets `causal = not sliding_window_non_causal` on every layer, so the key is always written, as true.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from speculators.algorithms.dflash import mask_token
from speculators.algorithms.draft_config import DraftConfig
from speculators.verifier import Verifier

if TYPE_CHECKING:
    from speculators.training.options import TrainOptions


class DFlashConfig(DraftConfig):
    """Qwen3-style layers (q_norm, k_norm); `block_size` counts the anchor slot, so K = block_size - 1."""

    algorithm: ClassVar[str] = "dflash"
    layer_model_type: ClassVar[str] = "qwen3"
    aux_layer_ids_key: ClassVar[str] = "aux_hidden_state_layer_ids"

    block_size: int = Field(8, ge=2)
    mask_token_id: int = Field(ge=0)

    @model_validator(mode="after")
    def _mask_in_vocabulary(self) -> "DFlashConfig":
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        return self

    @classmethod
    def from_options(
        cls, verifier: Verifier, options: "TrainOptions", aux_layer_ids: tuple[int, ...]
    ) -> "DFlashConfig":
        """A draft of the verifier's own shape, as the run's options ask for."""
        return cls(
            **cls.shape_of(verifier, options.draft_vocab_size),
            num_layers=options.num_layers or 2,
            aux_layer_ids=aux_layer_ids,
            block_size=options.block_size or 8,
            mask_token_id=mask_token.choose(verifier, options.mask_token_id),
        )

    @property
    def num_speculative_tokens(self) -> int:
        return self.block_size - 1

    def own_keys(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "sample_from_anchor": False,
            "sliding_window_non_causal": True,
        }

    @classmethod
    def own_fields(cls, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "block_size": config.get("block_size") or config["speculative_tokens"] + 1,
            "mask_token_id": config["mask_token_id"],
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        H, A, D = self.hidden_size, len(self.aux_layer_ids), self.draft_vocab_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, A * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
        if self.vocab_size != D:
            shapes |= {"lm_head.weight": (D, H), "d2t": (D,), "t2d": (self.vocab_size,)}
        q, kv, I = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.intermediate_size  # noqa: E741
        for n in range(self.num_layers):
            shapes |= {
                f"layers.{n}.self_attn.q_proj.weight": (q, H),
                f"layers.{n}.self_attn.k_proj.weight": (kv, H),
                f"layers.{n}.self_attn.v_proj.weight": (kv, H),
                f"layers.{n}.self_attn.o_proj.weight": (H, q),
                f"layers.{n}.self_attn.q_norm.weight": (self.head_dim,),
                f"layers.{n}.self_attn.k_norm.weight": (self.head_dim,),
                f"layers.{n}.mlp.gate_proj.weight": (I, H),
                f"layers.{n}.mlp.up_proj.weight": (I, H),
                f"layers.{n}.mlp.down_proj.weight": (H, I),
                f"layers.{n}.input_layernorm.weight": (H,),
                f"layers.{n}.post_attention_layernorm.weight": (H,),
            }
        return shapes

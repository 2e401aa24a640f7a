"""The dflash draft's config: keys and tensors as vLLM's `qwen3_dflash.py` loads them. No torch here.

The trap: vLLM sets `causal = not sliding_window_non_causal` on every layer, so the key is always written, as true.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from speculators.algorithms.dflash import mask_token
from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.verifier import Verifier

if TYPE_CHECKING:
    from speculators.training.options import TrainOptions


LayerType = Literal["full_attention", "sliding_attention"]


class DFlashConfig(DraftConfig):
    """Qwen3-style layers (q_norm, k_norm).

    Attributes:
        block_size: slots of a block, the anchor's included, so K = block_size - 1.
        mask_token_id: token id of the slots to fill.
        layer_types: one entry a layer; empty when all layers see the whole context.
        sliding_window: W: a slot at position p sees context from p - W + 1 on, in the sliding layers.
        learn_mask_embedding: the mask slots' embedding is trained, not the verifier's row of `mask_token_id`.
    """

    algorithm: ClassVar[str] = "dflash"
    layer_model_type: ClassVar[str] = "qwen3"
    aux_layer_ids_key: ClassVar[str] = "aux_hidden_state_layer_ids"
    default_rope_theta: ClassVar[float] = 1e6

    block_size: int = Field(8, ge=2)
    mask_token_id: int = Field(ge=0)
    layer_types: tuple[LayerType, ...] = ()
    sliding_window: int | None = None
    learn_mask_embedding: bool = False

    @model_validator(mode="after")
    def _mask_in_vocabulary(self) -> "DFlashConfig":
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        return self

    @model_validator(mode="after")
    def _windows(self) -> "DFlashConfig":
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_layers} layers")
        if self.sliding != (self.sliding_window is not None):
            raise ValueError("sliding_window and a sliding_attention entry in layer_types belong together")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(f"a sliding_window of {self.sliding_window} cuts a block of {self.block_size} slots")
        return self

    @property
    def sliding(self) -> bool:
        """Whether any layer sees only a window of the context."""
        return "sliding_attention" in self.layer_types

    def window_of(self, layer: int) -> int | None:
        """W of a layer; None for the whole context."""
        return self.sliding_window if self.layer_types and self.layer_types[layer] == "sliding_attention" else None

    @classmethod
    def from_options(
        cls, verifier: Verifier, options: "TrainOptions", aux_layer_ids: tuple[int, ...]
    ) -> "DFlashConfig":
        """A draft of the verifier's own shape, as the run's options ask for.

        Raises:
            UserError: a window smaller than the block, a mask token that text contains, a vocabulary too large.
        """
        num_layers, window = options.num_layers or 2, options.sliding_window
        if window is not None and window < options.block_size:
            raise UserError(
                f"--sliding-window: {window} is less than --block-size {options.block_size}, so a block would not see "
                f"its own anchor; allowed are {options.block_size} and more."
            )
        return cls(
            **cls.shape_of(verifier, options.draft_vocab_size),
            num_layers=num_layers,
            aux_layer_ids=aux_layer_ids,
            block_size=options.block_size,
            mask_token_id=mask_token.choose(verifier, options.mask_token_id),
            layer_types=("sliding_attention",) * num_layers if window else (),
            sliding_window=window,
            learn_mask_embedding=options.learn_mask_embedding,
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
            **({"learn_mask_embedding": True} if self.learn_mask_embedding else {}),
        }

    def layer_keys(self) -> dict[str, Any]:
        if not self.sliding:
            return {}
        return {"layer_types": list(self.layer_types), "sliding_window": self.sliding_window}

    @classmethod
    def own_fields(cls, config: dict[str, Any]) -> dict[str, Any]:
        layer = config["transformer_layer_config"]
        types = (layer.get("layer_types") or [])[: layer["num_hidden_layers"]]
        sliding = "sliding_attention" in types
        return {
            "block_size": config.get("block_size") or config["speculative_tokens"] + 1,
            "mask_token_id": config["mask_token_id"],
            "layer_types": tuple(types) if sliding else (),
            "sliding_window": layer.get("sliding_window") if sliding else None,
            "learn_mask_embedding": config.get("learn_mask_embedding", False),
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        H, A, D = self.hidden_size, len(self.aux_layer_ids), self.draft_vocab_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, A * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
        if self.vocab_size != D:
            shapes |= {"lm_head.weight": (D, H), "d2t": (D,), "t2d": (self.vocab_size,)}
        if self.learn_mask_embedding:
            shapes["mask_embedding"] = (H,)
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

"""The eagle3 draft's config: keys and tensors as vLLM's `llama_eagle3.py` and `qwen3_eagle3.py` load them. No torch.

The trap: `llama_eagle3.py` makes fc for three features unless `num_aux_hidden_states` in the layer config says else.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from speculators.algorithms.draft_config import DraftConfig
from speculators.verifier import Verifier

if TYPE_CHECKING:
    from speculators.training.options import TrainOptions


class Eagle3Config(DraftConfig):
    """One or more Llama layers; the first takes [embedding, hidden] and so has projections of 2H inputs.

    Attributes:
        ttt_steps: unrolled steps in training, and tokens drafted when served.
        norm_before_residual: the first layer's residual stream starts from the normed hidden state, not the plain one.
        norm_before_fc: one norm over all features together, before fc.
        fc_norm: one norm for each feature, before fc (after that of `norm_before_fc`).
        norm_output: the next step reads the state after the final norm, not the one before.
        head_norms: Qwen3-style layers, with a norm of each query and key head.
    """

    algorithm: ClassVar[str] = "eagle3"
    layer_model_type: ClassVar[str] = "llama"
    aux_layer_ids_key: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"

    ttt_steps: int = Field(3, ge=1)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    head_norms: bool = False

    @classmethod
    def from_options(
        cls, verifier: Verifier, options: "TrainOptions", aux_layer_ids: tuple[int, ...]
    ) -> "Eagle3Config":
        """A draft of the verifier's own shape, as the run's options ask for."""
        return cls(
            **cls.shape_of(verifier, options.draft_vocab_size),
            num_layers=options.num_layers or 1,
            aux_layer_ids=aux_layer_ids,
            ttt_steps=options.ttt_steps or 3,
            norm_before_residual=options.norm_before_residual,
            norm_before_fc=options.norm_before_fc,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
        )

    @property
    def num_speculative_tokens(self) -> int:
        return self.ttt_steps

    def own_keys(self) -> dict[str, Any]:
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return {name: getattr(self, name) for name in names}

    def layer_keys(self) -> dict[str, Any]:
        kind = {"model_type": "qwen3"} if self.head_norms else {}
        return {**kind, "num_aux_hidden_states": len(self.aux_layer_ids)}

    @classmethod
    def own_fields(cls, config: dict[str, Any]) -> dict[str, Any]:
        # vLLM's defaults (algos.py): norm_before_residual is true when the key is missing.
        return {
            "ttt_steps": config["speculative_tokens"],
            "norm_before_residual": config.get("norm_before_residual", True),
            "norm_before_fc": config.get("norm_before_fc", False),
            "fc_norm": config.get("fc_norm", False),
            "norm_output": config.get("norm_output", False),
            "head_norms": config["transformer_layer_config"].get("model_type") == "qwen3",
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        H, A, D = self.hidden_size, len(self.aux_layer_ids), self.draft_vocab_size
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab_size, H),
            "fc.weight": (H, A * H),
            "norm.weight": (H,),
            "lm_head.weight": (D, H),
        }
        if self.vocab_size != D:
            shapes |= {"d2t": (D,), "t2d": (self.vocab_size,)}
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (A * H,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (H,) for i in range(A)}
        q, kv, I = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.intermediate_size  # noqa: E741
        shapes["layers.0.hidden_norm.weight"] = (H,)
        for n in range(self.num_layers):
            width = 2 * H if n == 0 else H
            shapes |= {
                f"layers.{n}.self_attn.q_proj.weight": (q, width),
                f"layers.{n}.self_attn.k_proj.weight": (kv, width),
                f"layers.{n}.self_attn.v_proj.weight": (kv, width),
                f"layers.{n}.self_attn.o_proj.weight": (H, q),
                f"layers.{n}.mlp.gate_proj.weight": (I, H),
                f"layers.{n}.mlp.up_proj.weight": (I, H),
                f"layers.{n}.mlp.down_proj.weight": (H, I),
                f"layers.{n}.input_layernorm.weight": (H,),
                f"layers.{n}.post_attention_layernorm.weight": (H,),
            }
            if self.head_norms:
                shapes |= {f"layers.{n}.self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        return shapes

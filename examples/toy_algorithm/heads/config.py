"""The toy draft's config. No torch here, so that the command line stays fast."""

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from speculators.algorithms.draft_config import DraftConfig
from speculators.verifier import Verifier

if TYPE_CHECKING:
    from speculators.training.options import TrainOptions


class HeadsConfig(DraftConfig):
    """K matrices on one state.

    Attributes:
        num_heads_out: K.
    """

    algorithm: ClassVar[str] = "heads"
    layer_model_type: ClassVar[str] = "llama"
    aux_layer_ids_key: ClassVar[str] = "aux_hidden_state_layer_ids"

    num_heads_out: int = Field(3, ge=1)

    @classmethod
    def from_options(cls, verifier: Verifier, options: "TrainOptions", aux_layer_ids: tuple[int, ...]) -> "HeadsConfig":
        """A draft of the verifier's own shape; `num_layers` counts nothing here."""
        return cls(**cls.shape_of(verifier, options.draft_vocab_size), num_layers=1, aux_layer_ids=aux_layer_ids)

    @property
    def num_speculative_tokens(self) -> int:
        return self.num_heads_out

    def own_keys(self) -> dict[str, Any]:
        return {}

    @classmethod
    def own_fields(cls, config: dict[str, Any]) -> dict[str, Any]:
        return {"num_heads_out": config["speculative_tokens"]}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        H, A, D = self.hidden_size, len(self.aux_layer_ids), self.draft_vocab_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, (A + 1) * H), "norm.weight": (H,)}
        shapes |= {f"heads.{k}.weight": (H, H) for k in range(self.num_heads_out)}
        if self.vocab_size != D:
            shapes |= {"lm_head.weight": (D, H), "d2t": (D,), "t2d": (self.vocab_size,)}
        return shapes

"""What every draft's config shares, and how it becomes the `config.json` that vLLM reads. No torch here.

The trap: `transformer_layer_config.vocab_size` is the verifier's, `draft_vocab_size` the draft's.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import field_validator

from speculators import __version__
from speculators.errors import UserError
from speculators.rotary import SHARED_TYPES, todays_rope
from speculators.schema import Strict, validate
from speculators.verifier import Verifier

if TYPE_CHECKING:
    from speculators.training.options import TrainOptions


class Recipe(NamedTuple):
    """How an algorithm is trained unless the options say otherwise: peak learning rates of both optimizers; with muon,
    `adamw_lr` is for what is not a matrix."""

    optimizer: Literal["adamw", "muon"] = "muon"
    muon_lr: float = 5e-3
    adamw_lr: float = 1e-3


class DraftConfig(Strict):
    """Shape and provenance of a draft. Algorithms add their own fields and say what vLLM calls them."""

    algorithm: ClassVar[str]
    layer_model_type: ClassVar[str]
    aux_layer_ids_key: ClassVar[str]
    recipe: ClassVar[Recipe] = Recipe()
    # What vLLM takes when the config names no rope_theta.
    default_rope_theta: ClassVar[float] = 10000.0

    verifier: str
    verifier_revision: str = ""
    template_hash: str = ""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...]
    tie_word_embeddings: bool = False

    @field_validator("rope_parameters")
    @classmethod
    def _rotates_when_served_as_in_training(cls, value: dict[str, Any]) -> dict[str, Any]:
        kind = value.get("rope_type")
        if kind not in SHARED_TYPES:
            raise ValueError(
                f"rope_type {kind!r} is not rotated alike in training and by vLLM; known are {', '.join(SHARED_TYPES)}"
            )
        return value

    @property
    @abstractmethod
    def num_speculative_tokens(self) -> int:
        """K: tokens that the draft proposes in a step when served as trained."""

    @abstractmethod
    def own_keys(self) -> dict[str, Any]:
        """The algorithm's own top-level keys of config.json."""

    @classmethod
    @abstractmethod
    def own_fields(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `own_keys`."""

    def layer_keys(self) -> dict[str, Any]:
        """The algorithm's own keys of `transformer_layer_config`."""
        return {}

    @abstractmethod
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint with its shape."""

    @classmethod
    @abstractmethod
    def from_options(cls, verifier: Verifier, options: "TrainOptions", aux_layer_ids: tuple[int, ...]) -> Self:
        """The config of a new draft for this verifier."""

    @staticmethod
    def shape_of(verifier: Verifier, draft_vocab_size: int) -> dict[str, Any]:
        """Fields of a draft layer that has the verifier's own shape.

        Raises:
            UserError: the draft vocabulary is larger than the verifier's.
        """
        if draft_vocab_size > verifier.vocab_size:
            raise UserError(
                f"--draft-vocab-size: {draft_vocab_size} is more than the verifier's vocabulary; "
                f"allowed are 1 to {verifier.vocab_size}."
            )
        return {
            "draft_vocab_size": draft_vocab_size,
            "verifier": verifier.path,
            "verifier_revision": verifier.revision,
            "template_hash": verifier.template_hash,
            "hidden_size": verifier.hidden_size,
            "intermediate_size": verifier.intermediate_size,
            "num_heads": verifier.num_heads,
            "num_kv_heads": verifier.num_kv_heads,
            "head_dim": verifier.head_dim,
            "vocab_size": verifier.vocab_size,
            "rms_norm_eps": verifier.rms_norm_eps,
            "rope_parameters": verifier.rope_parameters,
            "max_position_embeddings": verifier.max_position_embeddings,
        }

    def to_json(self) -> dict[str, Any]:
        """The whole config.json."""
        return {
            "architectures": [f"{self.algorithm.capitalize()}Speculator"],
            "speculators_model_type": self.algorithm,
            "speculators_version": __version__,
            "speculators_config": {
                "algorithm": self.algorithm,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.num_speculative_tokens}],
                "verifier": {
                    "name_or_path": self.verifier,
                    "architectures": [],
                    "revision": self.verifier_revision,
                    "template_hash": self.template_hash,
                },
            },
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.hidden_size,
            self.aux_layer_ids_key: list(self.aux_layer_ids),
            "transformer_layer_config": self._layer_json(),
            "torch_dtype": "bfloat16",
            **self.own_keys(),
        }

    def _layer_json(self) -> dict[str, Any]:
        return {
            "model_type": self.layer_model_type,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope_parameters,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **self.layer_keys(),
        }

    @classmethod
    def from_json(cls, config: dict[str, Any], where: str) -> Self:
        """Read a config.json of this algorithm.

        Raises:
            UserError: a key that vLLM needs is missing or has a wrong value; the sentence names it.
        """
        try:
            layer = config["transformer_layer_config"]
            method = config["speculators_config"]["proposal_methods"][0]
            verifier = config["speculators_config"]["verifier"]
            fields = {
                "verifier": verifier["name_or_path"],
                "verifier_revision": verifier.get("revision", ""),
                "template_hash": verifier.get("template_hash", ""),
                "num_layers": layer["num_hidden_layers"],
                "hidden_size": layer["hidden_size"],
                "intermediate_size": layer["intermediate_size"],
                "num_heads": layer["num_attention_heads"],
                "num_kv_heads": layer["num_key_value_heads"],
                "head_dim": layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"],
                "vocab_size": layer["vocab_size"],
                "draft_vocab_size": config.get("draft_vocab_size") or layer["vocab_size"],
                "rms_norm_eps": layer["rms_norm_eps"],
                "rope_parameters": todays_rope(layer, cls.default_rope_theta),
                "max_position_embeddings": layer["max_position_embeddings"],
                "aux_layer_ids": tuple(config[cls.aux_layer_ids_key]),
                **cls.own_fields({**config, "speculative_tokens": method["speculative_tokens"]}),
            }
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            seen = f"{error} is missing" if isinstance(error, KeyError) else f"a value of another kind: {error}"
            raise UserError(
                f"{where}: not a complete {cls.algorithm} config ({seen}); vLLM would not load it."
            ) from None
        return validate(cls, fields, where)

"""What a run will need, from shapes alone: trained weights by part, memory, disk, steps. No torch here.

Weights, gradients, optimizer state and checkpoints are exact; activations are those kept for the backward pass of one
row, by the formula of `kept_bytes`, to which the attention's and the loss's short-lived chunks are added.
"""

import math
from collections import Counter
from typing import Literal, NamedTuple

from speculators.algorithms.draft_config import DraftConfig
from speculators.schema import Strict
from speculators.training.options import TrainOptions
from speculators.verifier import Verifier

MEMORY_FORMULA = (
    "frozen verifier ends 2 B (V + D) H; weights 4 B, gradients 4 B, optimizer 8 B a weight (muon: 4 B a matrix's); "
    "activations kept for the backward pass of one row; loss chunk of 512 rows x D x 4 B (28 B with tv or another "
    "verifier's way of making logits)"
)
_FROZEN = frozenset({"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"})
# Logits and, in their place, probabilities; where these cannot be made in place, several copies in float32.
_LOSS_CHUNK_ROWS, _LOSS_BYTES, _LOSS_BYTES_IN_FULL = 512, 4, 28
_DEFAULT_SAVES = 4

Shapes = dict[str, tuple[int, ...]]


class Memory(Strict):
    """Bytes at the peak of a step, on the device that trains. Frozen: the verifier's embedding and output rows."""

    frozen_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    loss_bytes: int

    @property
    def total_bytes(self) -> int:
        """All together."""
        return sum(self.model_dump().values())


class Row(NamedTuple):
    """A typical packed row: its tokens, those of them that are targets, and bytes of a value in a matrix product."""

    tokens: int
    supervised: int
    product_bytes: Literal[2, 4]


def trained_shapes(config: DraftConfig) -> Shapes:
    """The tensors that an optimizer changes; the others in a checkpoint are the verifier's or the vocabulary map."""
    return {name: shape for name, shape in config.tensor_shapes().items() if name not in _FROZEN}


def parts(config: DraftConfig) -> dict[str, int]:
    """Trained weights by part: fc, attention, mlp, norms."""
    sizes: Counter[str] = Counter()
    for name, shape in trained_shapes(config).items():
        part = "attention" if ".self_attn." in name else "mlp" if ".mlp." in name else name.partition(".")[0]
        sizes["norms" if len(shape) == 1 else part] += math.prod(shape)
    return dict(sizes.most_common())


def optimizer_bytes(shapes: Shapes, optimizer: str) -> int:
    """AdamW keeps two float32 moments and a step count a tensor, Muon (for matrices) one momentum."""
    one_moment = [math.prod(s) for s in shapes.values() if optimizer == "muon" and len(s) == 2]
    two_moments = [math.prod(s) for s in shapes.values() if optimizer != "muon" or len(s) != 2]
    return 4 * sum(one_moment) + 8 * sum(two_moments) + 4 * len(two_moments)


def checkpoint_bytes(config: DraftConfig, optimizer: str) -> int:
    """A checkpoint directory: what vLLM loads (bfloat16; d2t int64, t2d bool), float32 weights, optimizer state."""
    width = {"d2t": 8, "t2d": 1}
    served = sum(width.get(name, 2) * math.prod(shape) for name, shape in config.tensor_shapes().items())
    trained = trained_shapes(config)
    return served + 4 * sum(map(math.prod, trained.values())) + optimizer_bytes(trained, optimizer)


def checkpoints_kept(options: TrainOptions, steps: int) -> int:
    """Checkpoints on disk at once, the one being written included; best and last are always kept."""
    every = options.save_every or default_every(steps)
    most = -(-steps // every) if options.save_every != 0 else 1
    return (min(most, max(2, options.save_total_limit)) if options.save_total_limit else most) + 1


def default_every(steps: int) -> int:
    """Steps between validations, and between checkpoints, unless asked otherwise: a quarter of the run."""
    return max(1, -(-steps // _DEFAULT_SAVES))


def steps_per_epoch(rows: int, options: TrainOptions, world: int = 1) -> int:
    """Optimizer steps of a pass over the data."""
    return -(-rows // (options.accumulate * world))


def total_steps(rows: int, options: TrainOptions, world: int = 1) -> int:
    """Optimizer steps of the run."""
    steps = options.epochs * steps_per_epoch(rows, options, world)
    return min(steps, options.max_steps or steps)


def memory(config: DraftConfig, verifier: Verifier, options: TrainOptions, optimizer: str, row: Row) -> Memory:
    """The peak of a step."""
    shapes = trained_shapes(config)
    weights = 4 * sum(map(math.prod, shapes.values()))
    H, V, D = config.hidden_size, config.vocab_size, config.draft_vocab_size
    shared = verifier.tied and D == V
    in_full = options.loss_mix()["tv"] or verifier.final_softcap or verifier.logit_scale != 1.0
    return Memory(
        frozen_bytes=2 * H * (V if shared else V + D) + 4 * H,
        weights_bytes=weights,
        gradients_bytes=weights,
        optimizer_bytes=optimizer_bytes(shapes, optimizer),
        activations_bytes=kept_bytes(config, options, row),
        loss_bytes=_LOSS_CHUNK_ROWS * D * (_LOSS_BYTES_IN_FULL if in_full else _LOSS_BYTES),
    )


def kept_bytes(config: DraftConfig, options: TrainOptions, row: Row) -> int:
    """What one row keeps for its backward pass, the row itself (features and last states, bfloat16) included.

    With b = 2 (bf16 products) or 4 bytes, a query row keeps in each layer 2 b I for the MLP, 8 H for its residual
    stream, 2 b H for its normed copies, 3 b N D for queries before and after rotation and for outputs, and 4 b K D for
    its own keys and values. A context row keeps 2 b K D in each layer, and as much again in every pass over it. The
    layers' matrices are kept as the products take them. A chain (ttt_steps) passes once a step, with a query row for
    each supervised slot; a block draft passes once, with `block_size` of them a block.
    """
    b, layers, H = row.product_bytes, config.num_layers, config.hidden_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_query = b * (2 * config.intermediate_size + 2 * H + 3 * heads + 4 * kv) + 8 * H
    passes = 1 if _block_size(config) else config.num_speculative_tokens
    per_context = 2 * b * kv * (1 + passes)
    aux, angles = len(config.aux_layer_ids), 8 * config.head_dim
    per_token = 2 * (aux + 1) * H + (4 * aux * H if b == 4 else 0) + 2 * b * H + angles
    queries = query_rows(config, options, row)
    sizes = parts(config)
    copies = b * (sizes["attention"] + sizes["mlp"])
    in_layers = layers * (queries * per_query + row.tokens * per_context)
    return in_layers + row.tokens * per_token + queries * (angles + (2 + b) * H) + copies


def query_rows(config: DraftConfig, options: TrainOptions, row: Row) -> int:
    """Rows that pass through every layer: steps of chains, or slots of blocks."""
    block = _block_size(config)
    return min(options.max_anchors, row.supervised) * block if block else row.supervised * config.num_speculative_tokens


def _block_size(config: DraftConfig) -> int:
    """Slots of a block; 0 for a chain."""
    return int(getattr(config, "block_size", 0))

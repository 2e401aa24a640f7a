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
    "activations kept for the backward pass of one row; loss chunk of 512 rows x D x 28 B"
)
_FROZEN = frozenset({"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"})
_LOSS_CHUNK_ROWS, _LOSS_BYTES = 512, 28
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
    return Memory(
        frozen_bytes=2 * H * (V if shared else V + D) + 4 * H,
        weights_bytes=weights,
        gradients_bytes=weights,
        optimizer_bytes=optimizer_bytes(shapes, optimizer),
        activations_bytes=kept_bytes(config, options, row),
        loss_bytes=_LOSS_CHUNK_ROWS * D * _LOSS_BYTES,
    )


def kept_bytes(config: DraftConfig, options: TrainOptions, row: Row) -> int:
    """What one row keeps for its backward pass, the row itself (features and last states, bfloat16) included.

    With b = 2 (bf16 products) or 4 bytes, a query row keeps in each layer 4 b I for the MLP, 16 H for two residuals and
    their normed copies in float32, c H for what five products read (c = 10 in bf16, where each product has a copy of
    its own, 4 in float32), (3 b + 4) N D for queries and outputs and 2 (2 b + 4) K D for its own keys and values. A
    context row keeps 2 (2 b + 2) K D + 2 b H in each layer. bf16 products also keep a copy of the weights. A chain
    (ttt_steps) has a query row a supervised slot and step, a block draft `block_size` of them a block.
    """
    b, layers, H = row.product_bytes, config.num_layers, config.hidden_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    read = 10 if b == 2 else 4
    per_query = 4 * b * config.intermediate_size + (16 + read) * H + (3 * b + 4) * heads + 2 * (2 * b + 4) * kv
    per_context = 2 * (2 * b + 2) * kv + 2 * b * H
    aux = len(config.aux_layer_ids)
    per_token = b * aux * H + 2 * (aux + 1) * H + 8 * H
    queries = query_rows(config, options, row)
    copies = 2 * sum(parts(config).values()) if b == 2 else 0
    return layers * (queries * per_query + row.tokens * per_context) + row.tokens * per_token + queries * 8 * H + copies


def query_rows(config: DraftConfig, options: TrainOptions, row: Row) -> int:
    """Rows that pass through every layer: steps of chains, or slots of blocks."""
    block = getattr(config, "block_size", None)
    if block:
        return int(min(options.max_anchors, row.supervised)) * int(block)
    return row.supervised * config.num_speculative_tokens

"""A tiny real draft, data directory and cache for the tests of the training loop.

The toy predicts the next K tokens from `aux_hidden` at randomly drawn positions through two small layers with dropout,
so that weights, optimizer state, row order, the row's generator and the global generator all matter for a resume.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch.optim and FSDP import these on first use; here, each forked child has them already
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn

from speculators.algorithms.base import Algorithm, Batch, Metric, StepOutput
from speculators.algorithms.eagle3.config import Eagle3Config
from speculators.data.hidden_states import CacheManifest, HiddenStateCache, HiddenStates
from speculators.data.loader import PackedRows
from speculators.data.on_demand import OnDemand
from speculators.data.samples import FORMAT_VERSION, DataDirectory, DataManifest, SplitStats, TokenizedSample, sample_id
from speculators.errors import UserError
from speculators.training.log import TrainResult
from speculators.training.optim import resolve_hyper
from speculators.training.options import TrainOptions
from speculators.training.parallel import Ranks, start_ranks
from speculators.training.run_states import open_states
from speculators.training.trainer import Trainer
from speculators.verifier import Verifier

K, H, V = 2, 8, 32

VERIFIER = Verifier(
    path="/verifier",
    model_type="llama",
    revision="r",
    num_layers=4,
    hidden_size=H,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=V,
    norm_kind="plain",
    rms_norm_eps=1e-5,
    rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    max_position_embeddings=64,
    final_softcap=None,
    logit_scale=1.0,
    tied=True,
    eos_token_ids=(1,),
    pad_token_id=None,
    bos_token_id=None,
    template_hash="t",
)


class ToyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(2))
        self.norm = nn.RMSNorm(H)
        self.out = nn.Linear(H, K * V, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + self.dropout(layer(hidden).relu())
        return self.out(self.norm(hidden))


class Toy(Algorithm):
    """`poison` names a sample whose loss is nan; row number `interrupt_at` gets a Ctrl-C (from 1, counting the
    rows trained on, or those validated on); a row with a sample of `barren` has no targets and no gradient."""

    def __init__(
        self,
        config: Eagle3Config,
        poison: str = "",
        interrupt_at: int = 0,
        when_training: bool = True,
        barren: Collection[str] = (),
    ) -> None:
        self.config, self.module, self._poison, self._barren = config, ToyModule(), poison, set(barren)
        self._until_interrupt, self._when_training = interrupt_at, when_training

    @classmethod
    def build(cls, config: Any, verifier: Any, vocab: Any, options: Any) -> "Toy":
        return cls(config)

    def step(self, batch: Batch, generator: torch.Generator) -> StepOutput:
        if self.module.training == self._when_training:
            self._until_interrupt -= 1
            if self._until_interrupt == 0:
                signal.raise_signal(signal.SIGINT)
        if self._barren.intersection(batch.sample_ids):
            return StepOutput(torch.zeros(()), 0, torch.zeros(K + 1, dtype=torch.int64), {"used": Metric(0, 0)})
        usable = batch.loss_mask[K:] & (batch.document_ids[:-K] == batch.document_ids[K:])
        places = usable.nonzero()[:, 0]
        places = places[torch.randperm(len(places), generator=generator)[: max(1, len(places) // 2)]]
        logits = self.module(batch.aux_hidden.float().mean(1)[places]).float().unflatten(1, (K, V))
        targets = torch.stack([batch.ids[places + 1 + k] for k in range(K)], 1)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        if self._poison in batch.sample_ids:
            loss = loss * float("nan")
        accepted = (logits.argmax(-1) == targets).long().cumprod(1).sum(1)
        histogram = torch.bincount(accepted, minlength=K + 1)
        return StepOutput(loss, targets.numel(), histogram, {"used": Metric(len(places), int(usable.sum()))})

    def accepted_from_every_position(self, batch: Batch) -> Tensor:
        raise NotImplementedError

    def to(self, device: torch.device) -> None:
        self.module.to(device)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        self.module.load_state_dict(tensors)


def make_data(root: Path, num_samples: int = 40, seed: int = 0) -> None:
    """A data directory and its cache in `root`: noisy features that give the next token away."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(V, H)).astype(np.float32)
    manifest = CacheManifest.of(VERIFIER, (1, 2))
    cache = HiddenStateCache.create(root / "cache", manifest)
    splits: dict[Any, list[TokenizedSample]] = {"train": [], "validation": []}
    for i in range(num_samples):
        ids = random.integers(0, V, random.integers(6, 20)).astype(np.int32)
        mask = np.arange(len(ids)) >= 3
        sample = TokenizedSample(sample_id(ids), str(i), "toy", ids, mask)
        splits["validation" if i % 5 == 0 else "train"].append(sample)
        following = features[np.roll(ids, -1)]
        hidden = torch.from_numpy(following[:, None].repeat(2, 1)).bfloat16()
        cache.write(sample.sample_id, HiddenStates(torch.from_numpy(ids), hidden, hidden[:, 0].contiguous()))
    stats = {name: SplitStats.of(part) for name, part in splits.items()}
    DataDirectory.write(
        root / "data",
        DataManifest(
            format_version=FORMAT_VERSION,
            verifier="/verifier",
            verifier_revision="r",
            template_hash="t",
            max_length=64,
            validation_share=0.2,
            vocab_size=V,
            splits=stats,
        ),
        np.ones(V, dtype=np.int64),
        splits,
    )


def options_of(root: Path, output: str = "run", **changes: Any) -> TrainOptions:
    """Options of a run over the data in `root`: float32, a few steps."""
    values: dict[str, Any] = {
        "verifier": "/verifier",
        "data": root / "data",
        "hidden_states": root / "cache",
        "output": root / output,
        "speculator_type": "eagle3",
        "draft_vocab_size": V,
        "ttt_steps": K,
        "row_length": 32,
        "epochs": 3,
        "lr": 0.02,
        "precision": "float32",
        "device": "cpu",
    }
    # AdamW unless asked: Muon's bf16 products round differently on shards, and curves are compared to 1e-5 here.
    return TrainOptions(**{"optimizer": "adamw"} | values | changes)


def trainer_of(options: TrainOptions, ranks: Ranks, states: OnDemand | None = None, **toy: Any) -> Trainer:
    """A trainer of the toy; on the cache alone without other `states`."""
    if states is None:
        assert options.hidden_states
        states = OnDemand(HiddenStateCache.open(options.hidden_states, VERIFIER, options.aux_layer_ids))
    data = DataDirectory(options.data)
    rows = {
        split: PackedRows(data.split(split), states, split, options.row_length, options.seed)
        for split in ("train", "validation")
    }
    config = Eagle3Config.from_options(VERIFIER, options, states.shape.aux_layer_ids)
    torch.manual_seed(options.seed)
    return Trainer(
        Toy(config, **toy), rows["train"], rows["validation"], options, resolve_hyper(options, config), ranks
    )


def train_toy(options: TrainOptions, **toy: Any) -> tuple[TrainResult, Trainer]:
    """Train to the end in this process, on states from where the options say."""
    options.check()
    with (
        start_ranks(options.device) as ranks,
        open_states(options, VERIFIER, options.aux_layer_ids, ranks) as states,
    ):
        trainer = trainer_of(options, ranks, states, **toy)
        return trainer.run(), trainer


def one_rank(environment: dict[str, str], options: TrainOptions, errors: Path, toy: dict[str, Any]) -> None:
    """Body of a child process: one rank, its error written to a file, the command line's exit codes."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            train_toy(options, **toy)
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        errors.write_text(str(error))
        sys.exit(2)

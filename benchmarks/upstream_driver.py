"""Runs upstream `speculators==0.9.0`'s own trainer on exported rows, on a CPU. Started by upstream's interpreter.

    UPSTREAM_PYTHON upstream_driver.py JOB.json RESULT.json

Model, loss, optimizer, schedule, collation (with its padding to the row length) and the training loop are upstream's,
unchanged. What it needs on a CPU, all applied from outside:

- `draft_attn_impl="sdpa"`: FlexAttention, its default, has no backward on a CPU;
- `loss_implementation="eager"`: its fused losses are Triton kernels;
- three device patches: the trainer's local rank, an accelerator's index, becomes the device "cpu"; its device type,
  "cuda" when there is no accelerator, becomes "cpu" (it selects autocast's back end); and
  `torch.accelerator.synchronize`, called around every phase of a step, does nothing.

In upstream's favour: reading a row from disk is not counted in its steps. The trap: this file must not be run by our
interpreter, where `import speculators` is another package.
"""

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators.model import SpeculatorModel  # type: ignore[import-not-found]
from speculators.models.eagle3.data import shift_batch  # type: ignore[import-not-found]
from speculators.train import trainer as upstream  # type: ignore[import-not-found]
from speculators.train.cli import build_draft_model  # type: ignore[import-not-found]
from speculators.train.config import TrainConfig  # type: ignore[import-not-found]
from speculators.train.data import CollateFn  # type: ignore[import-not-found]
from training_job import Exported, Job, Measured, peak_bytes, settle


class Rows:
    """The exported rows in the order of the steps, collated by upstream. Stands in for its DataLoader.

    Attributes:
        tokens: real tokens of the rows given so far.
        reading_s: seconds spent in here so far.
    """

    batch_sampler = None

    def __init__(self, job: Job, exported: Exported, hidden_size: int) -> None:
        self._directory, self._order, self._length = Path(job.rows), exported.order, job.row_length
        preprocess = shift_batch if job.algorithm == "eagle3" else None
        layers = len(exported.aux_layer_ids)
        self._collate = CollateFn(job.row_length, hidden_size, layers, torch.bfloat16, preprocess)
        self.tokens: list[int] = []
        self.reading_s = 0.0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._order:
            started = time.perf_counter()
            tensors = load_file(self._directory / f"row-{row}.safetensors")
            self.tokens.append(min(len(tensors["ids"]), self._length))
            batch = self._collate(_samples(tensors))
            self.reading_s += time.perf_counter() - started
            yield batch


def _samples(row: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The documents of a row as upstream's data set gives them."""
    lengths = torch.bincount(row["document_ids"]).tolist()
    parts = {name: value.split(lengths) for name, value in row.items()}
    return [
        {
            "hidden_states": parts["aux_hidden"][i].flatten(1),
            "input_ids": parts["ids"][i],
            "verifier_last_hidden_states": parts["last_hidden"][i],
            "loss_mask": parts["loss_mask"][i].long(),
            "lengths": torch.tensor([length]),
            "position_ids": parts["positions"][i],
        }
        for i, length in enumerate(lengths)
    ]


def arguments_of(job: Job, exported: Exported) -> argparse.Namespace:
    """The job as upstream's options, derived defaults filled in by upstream.

    All layers attend to the whole context: its default is a window of 2,048 with a causal mask inside dflash blocks.
    """
    asked = {
        "speculator_type": job.algorithm, "verifier_name_or_path": job.verifier, "num_layers": job.num_layers,
        "draft_vocab_size": job.draft_vocab_size, "target_layer_ids": list(exported.aux_layer_ids),
        "mask_token_id": exported.mask_token_id, "full_attention_indices": list(range(job.num_layers)),
        "draft_attn_impl": "sdpa", "loss_implementation": "eager", "total_seq_len": job.row_length,
        "block_size": job.block_size, "max_anchors": job.max_anchors, "ttt_steps": job.ttt_steps, "seed": job.seed,
        "max_steps": job.steps, "epochs": 1, "save_path": job.output, "no_resume_from_checkpoint": True,
    }  # fmt: skip
    config = TrainConfig.from_flat({**asked, **job.overrides})
    return argparse.Namespace(**config.flatten())


def trainer_config(arguments: argparse.Namespace, model_class: Any) -> Any:
    """Upstream's trainer settings out of its options; field names agree but for these."""
    train, validation = model_class.get_trainer_kwargs(**vars(arguments))
    differing = {
        "num_epochs": arguments.epochs, "resume_from_checkpoint": False, "train_call_kwargs": train,
        "val_call_kwargs": validation, "hidden_states_dtype": getattr(torch, arguments.hidden_states_dtype),
    }  # fmt: skip
    same = set(upstream.TrainerConfig._fields) & set(vars(arguments)) - set(differing)
    return upstream.TrainerConfig(**{name: getattr(arguments, name) for name in same}, **differing)


def train(job: Job) -> Measured:
    """Build with upstream's factory, train with upstream's loop."""
    exported = Exported.model_validate_json((Path(job.rows) / "exported.json").read_text(encoding="utf-8"))
    vocab = load_file(Path(job.rows) / "vocab.safetensors")
    arguments = arguments_of(job, exported)
    torch.manual_seed(job.seed)
    model_class = SpeculatorModel.registry[job.algorithm]
    full = job.draft_vocab_size == exported.vocab_size
    maps = (None, None) if full else (vocab["t2d"], vocab["d2t"])
    model = build_draft_model(arguments, model_class, *maps, job.draft_vocab_size)
    rows = Rows(job, exported, model.config.transformer_layer_config.hidden_size)

    cpu = torch.device("cpu")
    upstream.get_local_rank = lambda: cpu
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[method-assign]
    losses = _Losses()
    trainer = upstream.Trainer(model, trainer_config(arguments, model_class), rows)
    trainer.device_type = "cpu"

    resident = settle()
    clock = _Clock(job, model, rows)
    clock.start()
    trainer.train_epoch(0, step_callback=clock.step)
    return Measured(
        step_s=tuple(clock.step_s),
        tokens=tuple(rows.tokens[: len(clock.step_s)]),
        losses=tuple(losses.seen),
        resident_bytes=resident,
        peak_bytes=clock.peak,
        checkpoints=tuple(clock.checkpoints),
        packages={name: version(name) for name in ("speculators", "torch", "transformers")},
    )


class _Losses(logging.Handler):
    """Takes the losses off upstream's metric log."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        upstream.metric_logger.setLevel(logging.INFO)
        upstream.metric_logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict):
            self.seen.append(float(record.msg.get("train", {}).get("loss", 0.0)))


class _Clock:
    """Times the steps by upstream's callback after each, and saves checkpoints, uncounted, where they are due."""

    def __init__(self, job: Job, model: Any, rows: Rows) -> None:
        self._job, self._model, self._rows = job, model, rows
        self.step_s: list[float] = []
        self.checkpoints: list[str] = []
        self.peak = 0

    def start(self) -> None:
        self._from, self._reading_before = time.perf_counter(), self._rows.reading_s

    def step(self) -> None:
        reading = self._rows.reading_s - self._reading_before
        self.step_s.append(time.perf_counter() - self._from - reading)
        self.peak = peak_bytes()
        number, every = len(self.step_s), self._job.save_every
        if every and (number % every == 0 or number == self._job.steps):
            path = Path(self._job.output) / f"step-{number:08d}"
            self._model.save_pretrained(path)
            self.checkpoints.append(str(path))
        self.start()


if __name__ == "__main__":
    result = train(Job.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(result.model_dump_json(), encoding="utf-8")

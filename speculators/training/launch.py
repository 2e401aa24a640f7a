"""From options to a run: opens verifier, data and cache, builds the draft, trains it."""

import sys
from collections.abc import Callable
from contextlib import ExitStack

import torch

from speculators.algorithms import lookup, objective_of
from speculators.algorithms.draft_config import DraftConfig
from speculators.data.loader import PackedRows
from speculators.data.on_demand import OnDemand
from speculators.data.samples import DataDirectory, Split
from speculators.data.vocab import VocabMap
from speculators.doctor import Facts, check_before_training
from speculators.errors import UserError
from speculators.training.log import TrainResult
from speculators.training.optim import resolve_hyper
from speculators.training.options import TrainOptions
from speculators.training.parallel import Ranks, start_ranks
from speculators.training.precision import uses_bf16
from speculators.training.pretrained import read_start
from speculators.training.run_states import open_states
from speculators.training.trainer import Trainer
from speculators.verifier import Verifier


def train(options: TrainOptions, on_ready: Callable[[], None] = lambda: None) -> TrainResult | None:
    """Train a draft, or continue its run.

    Args:
        options: the resolved options.
        on_ready: called on the first rank once everything has been checked, before the first step.

    Returns:
        The result on the first rank, None on the others.

    Raises:
        UserError: an option, the verifier, the data or the cache doesn't fit, or the loss is not finite.
        KeyboardInterrupt: asked to stop; a checkpoint was saved.
    """
    options.check()
    with start_ranks(options.device) as ranks, ExitStack() as opened:
        if options.fsdp and ranks.world == 1:
            raise UserError(
                "--fsdp: there is only one process to shard over; start several with "
                "`torchrun --nproc-per-node N -m speculators train`."
            )
        trainer = build(options, ranks, opened)
        if ranks.first:
            on_ready()
        result = trainer.run()
    return result if ranks.first else None


def build(options: TrainOptions, ranks: Ranks, opened: ExitStack) -> Trainer:
    """Everything up to the first step, checked; what must be closed after the last one is put on `opened`."""
    options = options.model_copy(update={"device": str(ranks.device)})
    verifier = Verifier.read(options.verifier)
    data = DataDirectory(options.data)
    data.check_made_for(verifier)
    start = read_start(options, verifier)
    layers = start.config.aux_layer_ids if start else options.aux_layer_ids
    states = opened.enter_context(open_states(options, verifier, layers, ranks))
    if start:
        config, vocab = start.config, start.vocab(data.token_counts)
    else:
        config = lookup(options.speculator_type).config.from_options(verifier, options, states.shape.aux_layer_ids)
        vocab = VocabMap.from_counts(data.token_counts, config.draft_vocab_size, always=verifier.eos_token_ids)
    train_rows = _rows(data, "train", states, options, ranks)
    validation_rows = _rows(data, "validation", states, options, ranks) if options.validate_every != 0 else None
    cache = None if train_rows.num_missing else states.cache
    check_before_training(Facts(verifier, data, cache, config, vocab, options), talk=ranks.first)
    torch.manual_seed(options.seed)
    algorithm = objective_of(config).build(config, verifier, vocab, options)
    if start:
        start.load_into(algorithm)
    hyper = resolve_hyper(options, config)
    trainer = Trainer(algorithm, train_rows, validation_rows, options, hyper, ranks)
    if ranks.first:
        print(_summary(trainer, train_rows, config, vocab), file=sys.stderr)
        if start and not options.dry_run:
            start.write_record(options.output)
    return trainer


def _rows(data: DataDirectory, split: Split, states: OnDemand, options: TrainOptions, ranks: Ranks) -> PackedRows:
    pin = ranks.device.type == "cuda"
    rows = PackedRows(data.split(split), states, split, options.row_length, options.seed, pin)
    if rows.num_missing and ranks.first:
        what = "will be asked for" if states.pool else "will be left out"
        print(f"{rows.num_missing} {split} samples are not in the cache and {what}.", file=sys.stderr)
    if not len(rows):
        hint = " or train without validation (--validate-every 0)" if split == "validation" else ""
        raise UserError(
            f"--data: {options.data} has no {split} sample with a supervised token ({rows.num_left_out} without); "
            f"run `speculators prepare` with more conversations{hint}."
        )
    return rows


def _summary(trainer: Trainer, rows: PackedRows, config: DraftConfig, vocab: VocabMap) -> str:
    options, hyper, ranks = trainer.options, trainer.hyper, trainer.ranks
    trained = sum(p.numel() for p in trainer.algorithm.module.parameters() if p.requires_grad)
    first = f"continues at step {trainer.step} of" if trainer.step else "takes"
    left_out = f", {rows.num_left_out} samples without a supervised token left out" if rows.num_left_out else ""
    products = "bf16" if uses_bf16(options.precision, ranks.device) else "float32"
    return (
        f"{config.algorithm}: {trained / 1e6:.1f}M trained weights, K = {config.num_speculative_tokens}, "
        f"draft vocabulary of {config.draft_vocab_size} covers {vocab.coverage:.1%} of the supervised tokens\n"
        f"{rows.num_tokens:,} tokens in {len(rows)} rows, {rows.fullness:.1%} full{left_out}\n"
        f"{ranks.world} x {ranks.device}, {products} products, {hyper.optimizer} at {hyper.lr:g}; "
        f"{first} {trainer.total_steps} steps"
    )

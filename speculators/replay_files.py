"""`speculators replay` on files: opens draft, verifier and text, walks, and writes the prediction."""

from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from speculators import checkpoint
from speculators.algorithms import objective_of
from speculators.algorithms.base import Algorithm, Batch
from speculators.data.extract_local import LocalSource
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.loader import row_of
from speculators.data.prepare import tokenize_files
from speculators.data.samples import DataDirectory, TokenizedSample
from speculators.data.vocab import VocabMap
from speculators.errors import UserError
from speculators.prediction import Prediction, SamplePrediction
from speculators.replay import replay
from speculators.replay_options import ReplayOptions
from speculators.schema import write_json
from speculators.training.options import TrainOptions
from speculators.training.precision import products
from speculators.verifier import Verifier


def load_draft(options: ReplayOptions) -> tuple[Algorithm, Verifier, str]:
    """The draft as it would be served: bfloat16-rounded weights from the checkpoint, its own vocabulary map.

    Raises:
        UserError: no checkpoint there, tensors that don't fit its config, or another verifier than it was trained for.
    """
    directory = checkpoint.resolve(options.draft)
    config = checkpoint.read_config(directory)
    checkpoint.check_tensors(directory, config)
    verifier = Verifier.read(options.verifier or config.verifier)
    if config.verifier_revision and config.verifier_revision != verifier.revision:
        raise UserError(
            f"--verifier: {verifier.path} has revision {verifier.revision}, the draft was trained for "
            f"{config.verifier_revision}; give the verifier it was trained for."
        )
    tensors = checkpoint.read_tensors(directory)
    size = config.vocab_size
    t2d = tensors["t2d"].numpy() if "t2d" in tensors else torch.ones(size, dtype=torch.bool).numpy()
    d2t = tensors["d2t"].numpy() if "d2t" in tensors else torch.zeros(size, dtype=torch.int64).numpy()
    vocab = VocabMap(t2d, d2t, coverage=float("nan"))
    here = Path()
    asked = TrainOptions(
        verifier=verifier.path, data=here, hidden_states=here, output=here, speculator_type=config.algorithm
    )
    algorithm = objective_of(config).build(config, verifier, vocab, asked)
    algorithm.load_tensors(tensors)
    return algorithm, verifier, str(directory)


def predict(options: ReplayOptions) -> Prediction:
    """Walk every sample; writes `options.output` when asked to."""
    if bool(options.answers) == bool(options.data and options.hidden_states):
        raise UserError("replay: give either --answers, or --data with --hidden-states: the text to walk.")
    algorithm, verifier, name = load_draft(options)
    samples = _samples(options, verifier)
    console = Console(stderr=True)
    rows = _rows(samples, options, verifier, algorithm.config.aux_layer_ids)
    counted = track(rows, "replay", total=len(samples), console=console)
    with products("auto", torch.device("cpu")):
        walked = replay(algorithm, counted)
    by_id = {sample.sample_id: sample for sample in samples}
    predictions = [
        SamplePrediction(
            sample_id=sample_id,
            conversation_id=by_id[sample_id].conversation_id,
            source=by_id[sample_id].source,
            acceptance=acceptance,
        )
        for sample_id, acceptance in walked
    ]
    prediction = Prediction.of(name, predictions, algorithm.config.num_speculative_tokens)
    if options.output:
        write_json(options.output, prediction)
    return prediction


def _samples(options: ReplayOptions, verifier: Verifier) -> list[TokenizedSample]:
    if options.data:
        data = DataDirectory(options.data)
        data.check_made_for(verifier)
        samples = list(data.split("validation"))
    else:
        samples = tokenize_files(verifier, options.answers, options.max_length)
    if not samples:
        raise UserError(f"replay: no answered conversation in {options.data or options.answers}; nothing to walk.")
    return samples


def _rows(
    samples: list[TokenizedSample], options: ReplayOptions, verifier: Verifier, aux_layer_ids: tuple[int, ...]
) -> Iterator[Batch]:
    if options.hidden_states:
        cache = HiddenStateCache.open(options.hidden_states, verifier, aux_layer_ids)
        for sample in samples:
            yield row_of([sample], [cache.read(sample.sample_id, sample.ids)])
    else:
        source = LocalSource(verifier, aux_layer_ids)
        for sample in samples:
            yield row_of([sample], [source(sample.sample_id, sample.ids)])

"""What the doctor's checks look at, and what they say. Opening is lenient: what cannot be opened is a finding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from speculators import checkpoint
from speculators.algorithms import lookup
from speculators.algorithms.draft_config import DraftConfig
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.samples import DataDirectory, Split, TokenizedSample
from speculators.data.vocab import VocabMap
from speculators.errors import UserError
from speculators.schema import Strict
from speculators.training.options import TrainOptions
from speculators.training.pretrained import read_start
from speculators.verifier import Verifier

Level = Literal["ok", "warning", "error"]
ResultT = TypeVar("ResultT")


class Finding(Strict):
    """What one check saw, what it means and what to do, in one sentence."""

    check: str
    level: Level
    sentence: str

    @classmethod
    def ok(cls, check: str, sentence: str) -> "Finding":
        """Nothing to do."""
        return cls(check=check, level="ok", sentence=sentence)

    @classmethod
    def warning(cls, check: str, sentence: str) -> "Finding":
        """Training goes on, its result may disappoint."""
        return cls(check=check, level="warning", sentence=sentence)

    @classmethod
    def error(cls, check: str, sentence: str) -> "Finding":
        """Training would fail, or learn something wrong."""
        return cls(check=check, level="error", sentence=sentence)


class Facts(NamedTuple):
    """What is at hand.

    Attributes:
        verifier, data: always there.
        cache: None without one (states that come from a server, or a cache that cannot be opened).
        config: the draft's, of the run's checkpoint if it has one; None when the options give none.
        vocab: its vocabulary map.
        options: of the run.
        refused: sentences about what could not be opened.
    """

    verifier: Verifier
    data: DataDirectory
    cache: HiddenStateCache | None
    config: DraftConfig | None
    vocab: VocabMap | None
    options: TrainOptions
    refused: tuple[str, ...] = ()

    def samples(self, most: int, split: Split = "train") -> list[TokenizedSample]:
        """At most `most` samples, evenly spaced over the split."""
        every = self.data.split(split)
        return [every[int(i)] for i in np.linspace(0, len(every) - 1, min(most, len(every)))]


class Chat(NamedTuple):
    """A verifier's tokenizer and its chat template as text."""

    tokenizer: Any
    template: str

    @classmethod
    def of(cls, verifier: Verifier) -> "Chat | None":
        """None when the verifier has no chat template, or no tokenizer that could be loaded."""
        if verifier.template_hash == "none":
            return None
        try:
            tokenizer = verifier.tokenizer
        except (OSError, ValueError):
            return None
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return cls(tokenizer, template) if template else None


def gather(options: TrainOptions, run: Path | None = None) -> Facts:
    """Open what a run with these options would; the draft is that of the newest checkpoint in `run`, if there is one.

    Raises:
        UserError: the verifier or the data directory is not there, or an option of another algorithm was given.
    """
    options.check()
    verifier = Verifier.read(options.verifier)
    data = DataDirectory(options.data)
    refused: list[str] = []

    def attempt(make: Callable[[], ResultT]) -> ResultT | None:
        try:
            return make()
        except UserError as error:
            refused.append(str(error))
            return None

    attempt(lambda: data.check_made_for(verifier))
    start = attempt(lambda: read_start(options, verifier))
    asked = start.config.aux_layer_ids if start else options.aux_layer_ids
    place, cache = options.hidden_states, None
    # With a server the cache may be one that the run will make.
    if place and not (options.vllm_endpoint and not (place / "manifest.json").exists()):
        cache = attempt(lambda: HiddenStateCache.open(place, verifier, asked))
    layers = cache.aux_layer_ids if cache else asked or verifier.default_aux_layer_ids()
    saved = checkpoint.all_checkpoints(run) if run else []
    if saved:
        config = attempt(lambda: checkpoint.read_config(saved[-1]))
    elif start:
        config = start.config
    else:
        config = attempt(lambda: lookup(options.speculator_type).config.from_options(verifier, options, layers))
    vocab = start.vocab(data.token_counts) if start else None
    if config and not start:
        size = config.draft_vocab_size
        vocab = attempt(lambda: VocabMap.from_counts(data.token_counts, size, always=verifier.eos_token_ids))
    return Facts(verifier, data, cache, config, vocab, options, tuple(refused))


def share(part: int, whole: int) -> str:
    """`part` of `whole` as a percentage, never rounded to 0 % or 100 %."""
    if not whole:
        return "0 %"
    percent = 100 * part / whole
    if 0 < percent < 1 or 99 < percent < 100:
        return f"{percent:.1f} %" if 0.05 <= percent <= 99.95 else "less than 0.1 %" if percent < 1 else "over 99.9 %"
    return f"{percent:.0f} %"


def gib(size_bytes: int) -> str:
    """A size to read."""
    return f"{size_bytes / (1 << 30):.2f} GiB" if size_bytes >= 10 << 20 else f"{size_bytes / (1 << 20):.2f} MiB"

"""`--from-pretrained`: a run that starts from a trained draft takes its structure and vocabulary map from it.

The trap: a continued run must not depend on what has become of the source since, so it starts from its own last
checkpoint, which has the same structure. The optimizer always starts fresh.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speculators.algorithms.base import Algorithm
from speculators.algorithms.draft_config import DraftConfig
from speculators.convert import ReadDraft, read_draft
from speculators.data.vocab import VocabMap
from speculators.errors import UserError
from speculators.schema import write_json
from speculators.training.options import TrainOptions, structural
from speculators.training.state import RunFiles
from speculators.verifier import Verifier

RECORD = "pretrained.json"


class Start(NamedTuple):
    """What a run starts from.

    Attributes:
        config: the draft's, with what an option may change changed.
        continued: whether the run has a checkpoint of its own, which the draft was then read from.
    """

    config: DraftConfig
    draft: ReadDraft
    continued: bool

    def vocab(self, token_counts: np.ndarray) -> VocabMap:
        """The draft's own map; `token_counts` (int64 [V]) only say how much of the data it covers."""
        size = self.config.vocab_size
        tensors = self.draft.tensors
        t2d = tensors["t2d"].numpy() if "t2d" in tensors else np.ones(size, dtype=np.bool_)
        d2t = tensors["d2t"].numpy() if "d2t" in tensors else np.zeros(size, dtype=np.int64)
        total = int(token_counts.sum())
        return VocabMap(t2d, d2t, int(token_counts[t2d].sum()) / total if total else float("nan"))

    def load_into(self, algorithm: Algorithm) -> None:
        """Set the weights of a draft of this config."""
        algorithm.load_tensors(self.draft.tensors)

    def write_record(self, run: Path) -> None:
        """Write down the source and its hash, once for a run."""
        if not self.continued:
            write_json(run / RECORD, self.draft.record)


def read_start(options: TrainOptions, verifier: Verifier) -> Start | None:
    """Read the draft of `--from-pretrained`; None without the option.

    Raises:
        UserError: no usable draft there, or an option that contradicts its structure.
    """
    if options.from_pretrained is None:
        return None
    last = None if options.restart else RunFiles(options.output).last()
    draft = read_draft(last or options.from_pretrained, verifier)
    _check_options(options, draft.config)
    config = draft.config
    if "ttt_steps" in options.model_fields_set and "ttt_steps" in type(config).model_fields:
        # Not of the tensors' shapes: a draft can be trained on with a longer chain than before.
        config = config.model_copy(update={"ttt_steps": options.ttt_steps})
    return Start(config, draft, last is not None)


def _check_options(options: TrainOptions, config: DraftConfig) -> None:
    """Structure is the draft's; an option may repeat it."""
    found: dict[str, Any] = {"speculator_type": config.algorithm, **{n: getattr(config, n) for n in structural(config)}}
    for name, value in found.items():
        asked = getattr(options, name)
        if name in options.model_fields_set and asked is not None and asked != value:
            raise UserError(
                f"--{name.replace('_', '-')}: {_shown(asked)} contradicts --from-pretrained {options.from_pretrained}, "
                f"whose draft has {_shown(value)}; leave the option out."
            )


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

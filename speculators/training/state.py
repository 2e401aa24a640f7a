"""The files of a run: checkpoints with all that an exact continuation needs, which of them is best, which to remove.

`training/` in a checkpoint holds the float32 weights and the optimizer's state; everything else (learning rate, rows,
random choices) follows from the step. Only names this module writes are ever removed.
"""

import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from speculators.algorithms.draft_config import DraftConfig
from speculators.checkpoint import BEST, CHECKPOINTS, Best, all_checkpoints, read_config, write
from speculators.errors import UserError
from speculators.schema import Strict, read_json, write_json, write_text
from speculators.training.log import TRAIN_LOG, ValidationRecord

_OURS = re.compile(r"step-\d{8}|\.step-\d{8}\.\d+\.[0-9a-f]{8}\.tmp")
_WEIGHT, _OPTIMIZER = "weight.", "optimizer."


class TrainingState(Strict):
    """Where a checkpoint stands in its run, and what a continuation must share with it."""

    step: int
    rows_per_step: int
    data: str
    settings: dict[str, Any]
    validation: ValidationRecord | None


class RunFiles:
    """The checkpoints of one run directory."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._folder = run / CHECKPOINTS

    def last(self) -> Path | None:
        """The newest checkpoint."""
        checkpoints = all_checkpoints(self.run)
        return checkpoints[-1] if checkpoints else None

    def best(self) -> Path | None:
        """The checkpoint with the greatest acceptance length on the validation split."""
        if not (self.run / BEST).exists():
            return None
        return self._folder / read_json(self.run / BEST, Best, "the best checkpoint's name").checkpoint

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, whether or not it is there."""
        return self._folder / f"step-{step:08d}"

    def state(self, checkpoint: Path) -> TrainingState:
        """Raises UserError when the checkpoint has no readable training state."""
        return read_json(checkpoint / "training" / "state.json", TrainingState, "the state of a training run")

    def remove_all(self) -> None:
        """Forget the run: its checkpoints, best.json and log, and nothing else."""
        for name in (BEST, TRAIN_LOG):
            (self.run / name).unlink(missing_ok=True)
        for path in self._own():
            _remove(path)

    def save(
        self,
        state: TrainingState,
        config: DraftConfig,
        draft: dict[str, Tensor],
        weights: dict[str, Tensor],
        optimizer: dict[str, Tensor],
    ) -> None:
        """Write the checkpoint of `state.step`, whole or not at all; one that is there gets the state (its validation).

        Raises:
            UserError: the disk is full or not writable; the checkpoint before stays in charge.
        """
        path = self.path_of(state.step)

        def write_training_state(folder: Path) -> None:
            tensors = {_WEIGHT + name: t for name, t in weights.items()} | {
                _OPTIMIZER + name: t for name, t in optimizer.items()
            }
            save_file(
                {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / "state.safetensors"
            )
            _write_state(folder, state)

        if path.exists():
            _write_state(path / "training", state)
            return
        try:
            write(path, config.to_json(), draft, write_training_state)
        except OSError as error:
            raise UserError(
                f"{path}: the checkpoint could not be written ({error.strerror}); make room and start again."
            ) from None

    def load(self, checkpoint: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The float32 weights and the optimizer's state of a checkpoint.

        Raises:
            UserError: damaged; the file is named.
        """
        file = checkpoint / "training" / "state.safetensors"
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{file}: cannot be read ({error}); remove {checkpoint} to continue from the one before."
            ) from None
        weights = {name.removeprefix(_WEIGHT): t for name, t in tensors.items() if name.startswith(_WEIGHT)}
        optimizer = {name.removeprefix(_OPTIMIZER): t for name, t in tensors.items() if name.startswith(_OPTIMIZER)}
        return weights, optimizer

    def choose_best(self) -> None:
        """Point best.json at the checkpoint with the greatest acceptance length (the earliest of equals)."""
        candidates = []
        for path in all_checkpoints(self.run):
            state = self.state(path)
            if state.validation and state.validation.acceptance.steps:
                candidates.append(
                    Best(checkpoint=path.name, step=state.step, acceptance_length=state.validation.acceptance_length)
                )
        if candidates:
            write_json(self.run / BEST, max(candidates, key=lambda best: (best.acceptance_length, -best.step)))

    def prune(self, limit: int | None) -> None:
        """Remove this run's oldest checkpoints beyond `limit`, never the best or the last, and what a crash left."""
        for path in self._own():
            if path.name.startswith("."):
                _remove(path)
        saved = [path for path in self._own() if not path.name.startswith(".")]
        kept = {self.best(), self.last()}
        removable = [path for path in saved if path not in kept]
        excess = len(saved) - limit if limit else 0
        for path in removable[: max(0, excess)]:
            _remove(path)

    def check_continues(self, checkpoint: Path, config: DraftConfig, wanted: TrainingState) -> TrainingState:
        """The state to continue from.

        Raises:
            UserError: the checkpoint was trained with settings, data or a draft that this run does not ask for.
        """
        state = self.state(checkpoint)
        for name, value in wanted.settings.items():
            if name in state.settings and state.settings[name] != value:
                flag = f"--{name.replace('_', '-')}"
                raise self._refusal(flag, state.settings[name], value)
        if state.rows_per_step != wanted.rows_per_step:
            raise self._refusal(
                "rows per step over all ranks (--accumulate)", state.rows_per_step, wanted.rows_per_step
            )
        if state.data != wanted.data:
            raise self._refusal("data of the hash", state.data, wanted.data)
        before = read_config(checkpoint)
        for name in type(config).model_fields:
            if name != "verifier" and getattr(before, name, None) != getattr(config, name):
                raise self._refusal(f"a draft whose {name} is", getattr(before, name, None), getattr(config, name))
        return state

    def _refusal(self, what: str, seen: Any, wanted: Any) -> UserError:
        return UserError(
            f"--output: {self.run} holds checkpoints trained with {what} {seen}, this run asks for {wanted}; "
            "give the same settings, another --output, or --restart to begin anew."
        )

    def _own(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("*") if _OURS.fullmatch(path.name))


def _write_state(folder: Path, state: TrainingState) -> None:
    write_text(folder / "state.json", state.model_dump_json(indent=2) + "\n")


def _remove(path: Path) -> None:
    """Remove a checkpoint; renamed first, so that a crash meanwhile leaves no half of one under a checkpoint's name."""
    hidden = path
    if not path.name.startswith("."):
        hidden = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
        path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)

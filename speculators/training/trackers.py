"""Trackers that a run's numbers go to besides `train.jsonl`: one entry each, its package imported when it is opened.

The trap: a tracker is an extra. One that fails on the way is named on stderr and left out, and the run goes on.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from speculators.errors import UserError


class Tracker(NamedTuple):
    """An open tracker: `log(numbers by name, step)`, then `close()`."""

    log: Callable[[dict[str, float], int], object]
    close: Callable[[], object]


class Entry(NamedTuple):
    """A kind of tracker: the package it needs, and `start(run directory, settings, step to continue from)`."""

    package: str
    start: Callable[[Path, dict[str, Any], int], Tracker]


def _tensorboard(run: Path, settings: dict[str, Any], step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # What a run that crashed wrote after the step that is continued is hidden.
    writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)
    writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()), step)

    def log(numbers: dict[str, float], at: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, at)

    return Tracker(log, writer.close)


def _wandb_like(package: str, run: Path, settings: dict[str, Any], step: int) -> Tracker:
    """wandb's interface, which trackio shares. The parts of a continued run share its group."""
    project = os.environ.get(f"{package.upper()}_PROJECT", "speculators")
    name = f"{run.name} from step {step}" if step else run.name
    made = importlib.import_module(package).init(project=project, name=name, group=run.name, config=settings)
    return Tracker(lambda numbers, at: made.log(numbers, step=at), made.finish)


TRACKERS: dict[str, Entry] = {
    "tensorboard": Entry("tensorboard", _tensorboard),
    "wandb": Entry("wandb", partial(_wandb_like, "wandb")),
    "trackio": Entry("trackio", partial(_wandb_like, "trackio")),
}


def check_installed(names: Sequence[str]) -> None:
    """Raises UserError for a tracker whose package is not installed."""
    for name in names:
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"--tracker {name}: the package {package} is not installed; install it (`pip install {package}`) or "
                "leave the option out, train.jsonl is written in any case."
            )


class Trackers:
    """The open trackers of a run."""

    def __init__(self, opened: dict[str, Tracker] | None = None) -> None:
        self._opened = opened or {}

    @classmethod
    def open(cls, names: Sequence[str], run: Path, settings: dict[str, Any], step: int) -> "Trackers":
        """Open the trackers of these names.

        Raises:
            UserError: one of them cannot start (nobody logged in, no network, a broken package).
        """
        opened = {}
        for name in names:
            try:
                opened[name] = TRACKERS[name].start(run, settings, step)
            except Exception as error:  # whatever the package raises, it is the user's to fix
                cls(opened).close()
                reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
                raise UserError(
                    f"--tracker {name}: cannot start ({reason}); set it up or leave the option out."
                ) from None
        return cls(opened)

    def log(self, record: BaseModel) -> None:
        """Hand on a record's numbers; `record` has `kind` and `step`."""
        if self._opened:
            numbers = numbers_of(record)
            self._each("log", lambda tracker: tracker.log(numbers, record.step))  # type: ignore[attr-defined]

    def close(self) -> None:
        """Write out what is pending."""
        self._each("close", lambda tracker: tracker.close())

    def _each(self, what: str, do: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._opened.items()):
            try:
                do(tracker)
            except Exception as error:  # a lost network ends no training
                del self._opened[name]
                print(f"warning: tracker {name} failed ({what}: {error}); it gets nothing more.", file=sys.stderr)


def numbers_of(record: BaseModel) -> dict[str, float]:
    """The finite numbers of a record as `kind/name`; entries of a list are numbered from 1, as draft positions are."""
    values = record.model_dump(exclude={"kind", "step", "acceptance"})
    flat = {f"{record.kind}/{name}": number for name, number in _flatten(values)}  # type: ignore[attr-defined]
    return {name: number for name, number in flat.items() if math.isfinite(number)}


def _flatten(values: dict[str, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flatten(value)
        elif isinstance(value, (list, tuple)):
            found += [(f"{name}_{i}", float(number)) for i, number in enumerate(value, 1)]
        else:
            found.append((name, float(value)))
    return found

"""Trackers get the numbers of train.jsonl; one that is missing or fails is said, and ends no training."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from toy_training import make_data, options_of, train_toy

from speculators.cli.options import resolve
from speculators.errors import UserError
from speculators.training.log import StepRecord, ValidationRecord, read_log
from speculators.training.options import TrainOptions
from speculators.training.trackers import TRACKERS, numbers_of

FAKE = """
logged, ended, settings = [], [], {}
class Run:
    def log(self, numbers, step):
        if step >= fails_at: raise OSError("no network")
        logged.append((step, numbers))
    def finish(self): ended.append(True)
def init(**given):
    settings.update(given)
    return Run()
fails_at = 1e9
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_data(tmp_path)
    return tmp_path


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an importable package of a tracker's interface."""

    def make(package: str) -> types.ModuleType:
        place = tmp_path / "packages" / package
        place.mkdir(parents=True)
        (place / "__init__.py").write_text(FAKE)
        monkeypatch.syspath_prepend(str(place.parent))
        monkeypatch.delitem(sys.modules, package, raising=False)
        return __import__(package)

    return make


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_every_step_and_validation_and_the_settings(root: Path, fake: Any, name: str) -> None:
    module = fake(name)
    train_toy(options_of(root, tracker=(name,)))
    records = read_log(root / "run")
    assert [step for step, _ in module.logged] == [record.step for record in records]
    for (_, numbers), record in zip(module.logged, records, strict=True):
        if isinstance(record, StepRecord):
            assert numbers["step/loss"] == record.loss
            assert numbers["step/used"] == record.metrics["used"]
        else:
            assert numbers["validation/acceptance_length"] == record.acceptance_length
            assert numbers["validation/marginal_1"] == record.marginal[0]
    assert module.ended == [True]
    assert module.settings["config"]["lr"] == 0.02
    assert module.settings["group"] == "run"


def test_a_tracker_that_fails_on_the_way_is_said_once_and_training_goes_on(
    root: Path, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake("wandb").fails_at = 3
    result, trainer = train_toy(options_of(root, tracker=("wandb",), validate_every=0))
    assert result.steps == trainer.total_steps
    assert capsys.readouterr().err.count("tracker wandb failed (log: no network)") == 1


def test_tensorboard_gets_scalars_by_name_and_step(root: Path, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: dict[tuple[str, int], float] = {}

    class SummaryWriter:
        def __init__(self, place: str, purge_step: int | None) -> None:
            assert (place, purge_step) == (str(root / "run" / "tensorboard"), None)

        def add_text(self, *_: object) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars[name, step] = value

        def close(self) -> None:
            scalars["closed", 0] = 1.0

    fake("tensorboard")
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    train_toy(options_of(root, tracker=("tensorboard",)))
    losses = {r.step: r.loss for r in read_log(root / "run") if isinstance(r, StepRecord)}
    assert {step: value for (name, step), value in scalars.items() if name == "step/loss"} == losses
    assert ("closed", 0) in scalars


def test_the_real_tensorboard_reads_back_what_was_logged(root: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_toy(options_of(root, tracker=("tensorboard",)))
    events = accumulator.EventAccumulator(str(root / "run" / "tensorboard"))
    events.Reload()
    losses = [r.loss for r in read_log(root / "run") if isinstance(r, StepRecord)]
    assert [event.value for event in events.Scalars("step/loss")] == pytest.approx(losses)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_not_installed_is_one_sentence(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UserError, match=f"--tracker {name}: the package {name} is not installed"):
        options_of(root, tracker=(name,)).check()


def test_an_unknown_tracker_is_refused_with_the_known_ones() -> None:
    given = {"verifier": "v", "data": "d", "hidden_states": "h", "output": "o", "speculator_type": "eagle3"}
    with pytest.raises(UserError, match=r"^--tracker: unknown tracker 'mlflow'; known trackers are tensorboard"):
        resolve(TrainOptions, {**given, "tracker": "mlflow"})


def test_numbers_that_are_not_finite_are_left_out() -> None:
    from speculators.acceptance import Acceptance

    empty = Acceptance.from_histogram([0, 0, 0])
    record = ValidationRecord.of(3, float("nan"), empty, 1.0, {"covered": 0.5})
    numbers = numbers_of(record)
    assert "validation/loss" not in numbers
    assert numbers["validation/covered"] == 0.5

"""The loop on a toy draft: it learns, resumes exactly, stops when asked, refuses what it must."""

import signal
from pathlib import Path

import pytest
import torch
from toy_training import VERIFIER, make_data, options_of, train_toy, trainer_of

from speculators.checkpoint import all_checkpoints, read_tensors, resolve
from speculators.data.hidden_states import HiddenStateCache
from speculators.errors import UserError
from speculators.schema import read_json_dict
from speculators.training.log import StepRecord, ValidationRecord, read_log
from speculators.training.parallel import Ranks
from speculators.training.stop import StopRequest
from speculators.training.sums import seeded
from speculators.training.trainer import Trainer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_data(tmp_path)
    return tmp_path


def assert_same_bits(a: Trainer, b: Trainer) -> None:
    one, other = dict(a.algorithm.module.named_parameters()), dict(b.algorithm.module.named_parameters())
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def step_losses(run: Path) -> list[float]:
    return [record.loss for record in read_log(run) if isinstance(record, StepRecord)]


def test_learns_and_leaves_a_best_checkpoint_that_resolves(root: Path):
    result, trainer = train_toy(options_of(root, epochs=12, validate_every=20))
    steps = [r for r in read_log(root / "run") if isinstance(r, StepRecord)]
    validations = [r for r in read_log(root / "run") if isinstance(r, ValidationRecord)]
    assert [r.step for r in steps] == list(range(1, trainer.total_steps + 1))
    assert validations[-1].loss < 0.8 * validations[0].loss
    assert result.validation
    assert result.validation.acceptance_length == max(v.acceptance_length for v in validations)
    assert resolve(root / "run") == Path(result.best)
    assert {t.dtype for t in read_tensors(Path(result.best)).values()} == {torch.bfloat16}


@pytest.mark.parametrize(("optimizer", "interrupt_at"), [("adamw", 1), ("adamw", 14), ("muon", 7)])
def test_interrupted_at_any_step_equals_uninterrupted_bit_by_bit(root: Path, optimizer: str, interrupt_at: int):
    settings = {"optimizer": optimizer, "accumulate": 2}
    _, whole = train_toy(options_of(root, "whole", **settings))
    with pytest.raises(KeyboardInterrupt):
        train_toy(options_of(root, "parts", **settings), interrupt_at=interrupt_at)
    assert len(step_losses(root / "parts")) == (interrupt_at + 1) // 2
    result, resumed = train_toy(options_of(root, "parts", **settings))
    assert result.steps == whole.total_steps
    assert_same_bits(whole, resumed)
    assert step_losses(root / "whole") == step_losses(root / "parts")


@pytest.mark.parametrize("interrupt_at", [1, 3, 6])
def test_interrupted_while_validating_it_validates_that_step_when_continued(root: Path, interrupt_at: int):
    settings = {"validate_every": 20, "epochs": 2}
    calm, _ = train_toy(options_of(root, "calm", **settings))
    with pytest.raises(KeyboardInterrupt):
        train_toy(options_of(root, "run", **settings), interrupt_at=interrupt_at, when_training=False)
    result, _ = train_toy(options_of(root, "run", **settings))
    assert Path(result.best).name == Path(calm.best).name
    records = [[r for r in read_log(root / name) if isinstance(r, ValidationRecord)] for name in ("calm", "run")]
    assert [(r.step, r.acceptance) for r in records[0]] == [(r.step, r.acceptance) for r in records[1]]


def test_the_first_signal_asks_the_second_ends_at_once():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_finished_run_started_again_gives_its_result_without_training(root: Path):
    first, _ = train_toy(options_of(root))
    again, _ = train_toy(options_of(root))
    assert again.tokens == 0
    assert (again.best, again.validation) == (first.best, first.validation)


def test_accumulated_rows_give_the_gradient_of_one_large_batch(root: Path):
    """One division by the global number of targets: two rows a step equal a hand-written mean over both."""
    trainer = trainer_of(options_of(root, accumulate=2), Ranks(0, 1, torch.device("cpu")))
    loss, targets = torch.zeros(()), 0
    for slot in trainer._schedule.slots(0):
        output = trainer.algorithm.step(trainer._train.read(slot.row), seeded(slot.seed))
        loss, targets = loss + output.loss_sum, targets + output.num_targets
    expected = torch.autograd.grad(loss / targets, trainer._parameters)
    norm = torch.stack([g.norm() for g in expected]).norm()

    result, _ = train_toy(options_of(root, "one", accumulate=2, max_steps=1))
    record = next(r for r in read_log(root / "one") if isinstance(r, StepRecord))
    assert result.steps == 1
    assert record.targets == targets
    assert record.loss == pytest.approx((loss / targets).item(), rel=1e-6)
    assert record.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_validation_repeats_itself_and_never_changes_training(root: Path):
    _, often = train_toy(options_of(root, "often", validate_every=1))
    _, never = train_toy(options_of(root, "never", validate_every=0))
    assert_same_bits(often, never)
    assert not (root / "never" / "best.json").exists()
    _, _ = train_toy(options_of(root, "again", validate_every=1))
    seen = [
        [r.acceptance for r in read_log(root / name) if isinstance(r, ValidationRecord)] for name in ("often", "again")
    ]
    assert seen[0] == seen[1]


def test_pruning_keeps_best_last_and_everything_that_is_not_ours(root: Path):
    strangers = [root / "run" / "checkpoints" / name for name in ("step-1", "step-00000001-copy", "notes")]
    for stranger in strangers:
        stranger.mkdir(parents=True)
    result, trainer = train_toy(options_of(root, save_every=1, validate_every=4, save_total_limit=2))
    kept = {path.name for path in all_checkpoints(root / "run")}
    assert len(kept) == 2
    assert {Path(result.best).name, f"step-{trainer.total_steps:08d}"} <= kept
    train_toy(options_of(root, restart=True, max_steps=1))
    assert all(stranger.is_dir() for stranger in strangers)
    assert [path.name for path in all_checkpoints(root / "run")] == ["step-00000001"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.5}, "--lr 0.02, this run asks for 0.5"),
        ({"accumulate": 2}, "rows per step over all ranks (--accumulate) 1, this run asks for 2"),
        ({"ttt_steps": 3}, "--ttt-steps 2, this run asks for 3"),
    ],
)
def test_a_resume_with_other_settings_is_refused(root: Path, changes: dict, words: str):
    train_toy(options_of(root, max_steps=2))
    with pytest.raises(UserError, match="--restart") as refused:
        train_toy(options_of(root, max_steps=2, **changes))
    assert words in str(refused.value)


def test_a_resume_with_other_data_is_refused(root: Path, tmp_path_factory: pytest.TempPathFactory):
    train_toy(options_of(root, max_steps=2))
    other = tmp_path_factory.mktemp("other")
    make_data(other, seed=1)
    with pytest.raises(UserError, match="data of the hash"):
        train_toy(options_of(other, max_steps=2, output=str(root / "run")))


def test_a_loss_that_is_not_finite_stops_the_run_and_names_samples_and_checkpoint(root: Path):
    _, trainer = train_toy(options_of(root, "clean", max_steps=5))
    row = trainer._schedule.slots(3)[0].row
    poison = trainer._train.read(row).sample_ids[0]
    with pytest.raises(UserError, match=r"step 4: the loss is nan .*step-00000002") as stopped:
        train_toy(options_of(root, save_every=2, max_steps=5), poison=poison)
    assert poison in read_json_dict(root / "run" / "non_finite.json", "samples")["sample_ids"]
    assert poison in str(stopped.value)
    assert len(step_losses(root / "run")) == 3


def test_a_step_without_targets_says_so_and_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]):
    trainer = trainer_of(options_of(root, "fresh"), Ranks(0, 1, torch.device("cpu")))
    barren = [sample.sample_id for sample in trainer._train._samples]
    _, after = train_toy(options_of(root, max_steps=1, validate_every=0), barren=barren)
    assert_same_bits(trainer, after)
    assert "step 1: no token of this step is a target in the draft vocabulary" in capsys.readouterr().err
    (record,) = read_log(root / "run")
    assert (record.targets, record.loss) == (0, 0.0)


def test_a_damaged_row_is_named_by_the_trainer(root: Path):
    cache = HiddenStateCache.open(root / "cache", VERIFIER, None)
    for file in list(cache.path.glob("*/*.safetensors")):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"safetensors: truncated or damaged"):
        train_toy(options_of(root))

"""Real processes: two gloo ranks equal one, an error on one ends all, and a kill at any moment loses no checkpoint."""

import multiprocessing
import random
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_server import sample_of, serve
from dying import save_and_die
from toy_training import make_data, one_rank, options_of, train_toy

from speculators.checkpoint import all_checkpoints, read_tensors
from speculators.data.skipped import read_skipped
from speculators.schema import read_json_dict
from speculators.training.log import StepRecord, read_log
from speculators.training.state import RunFiles

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def processes() -> Any:
    """Children forked from a server that has imported everything: they start in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["toy_training"])
    with pytest.MonkeyPatch.context() as patch:
        # The server looks for what it preloads in PYTHONPATH alone (Python 3.11).
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        context.Process(target=print, args=("",), kwargs={"end": ""}).start()
    return context


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_data(tmp_path, num_samples=41)
    return tmp_path


def start(
    processes: Any, root: Path, world: int, output: str, toys: dict[int, dict] | None = None, **changes: Any
) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    for rank in range(world):
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = (
            environment,
            options_of(root, output, **changes),
            root / f"error-{rank}",
            (toys or {}).get(rank, {}),
        )
        started.append(processes.Process(target=one_rank, args=arguments))
        started[-1].start()
    return started


def exit_codes(started: list[Any]) -> list[int]:
    for process in started:
        process.join(60)
    return [process.exitcode for process in started]


def step_losses(run: Path) -> torch.Tensor:
    return torch.tensor([record.loss for record in read_log(run) if isinstance(record, StepRecord)])


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_give_the_loss_curve_of_one(processes: Any, root: Path, fsdp: bool):
    train_toy(options_of(root, "one", accumulate=2))
    assert exit_codes(start(processes, root, 2, "two", fsdp=fsdp)) == [0, 0]
    torch.testing.assert_close(step_losses(root / "two"), step_losses(root / "one"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fsdp", [False, True])
def test_rows_with_nothing_to_learn_on_some_ranks_hold_up_nobody(processes: Any, root: Path, fsdp: bool):
    """The second row of the first step, so the second rank's only one there, and both rows of the third step."""
    _, clean = train_toy(options_of(root, "clean", accumulate=2, max_steps=1))
    slots = [clean._schedule.slots(0)[1], *clean._schedule.slots(2)]
    toy = {"barren": [clean._train._samples[clean._train.rows[slot.row][0]].sample_id for slot in slots]}
    train_toy(options_of(root, "one", accumulate=2), **toy)
    assert exit_codes(start(processes, root, 2, "two", {0: toy, 1: toy}, fsdp=fsdp)) == [0, 0]
    torch.testing.assert_close(step_losses(root / "two"), step_losses(root / "one"), rtol=1e-5, atol=0)
    assert read_log(root / "two")[2].targets == 0


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_with_its_samples(processes: Any, root: Path):
    _, trainer = train_toy(options_of(root, "clean", accumulate=2, max_steps=3))
    row = trainer._train.rows[trainer._schedule.slots(1)[1].row]
    poison = trainer._train._samples[row[0]].sample_id
    toy = {"poison": poison}
    assert exit_codes(start(processes, root, 2, "two", {0: toy, 1: toy}, save_every=1)) == [2, 2]
    for rank in (0, 1):
        sentence = (root / f"error-{rank}").read_text()
        assert sentence.startswith("step 2: the loss is nan")
        assert "step-00000001" in sentence
    named = read_json_dict(root / "two" / "non_finite.json", "samples")["sample_ids"]
    assert set(named) == {trainer._train._samples[i].sample_id for i in row}


@pytest.mark.parametrize("fsdp", [False, True])
def test_an_error_on_one_rank_ends_all_with_its_sentence(processes: Any, root: Path, fsdp: bool):
    _, trainer = train_toy(options_of(root, "clean", accumulate=2, max_steps=3))
    victim = trainer._train._samples[trainer._train.rows[trainer._schedule.slots(1)[1].row][0]].sample_id
    next((root / "cache").glob(f"*/{victim}.safetensors")).write_bytes(b"")
    assert exit_codes(start(processes, root, 2, "two", fsdp=fsdp)) == [2, 2]
    sentence = (root / "error-1").read_text()
    assert victim in sentence
    assert (root / "error-0").read_text() == f"rank 1: {sentence}"


@pytest.mark.parametrize("fsdp", [False, True])
def test_ranks_stop_together_and_continue_together(processes: Any, root: Path, fsdp: bool):
    train_toy(options_of(root, "one", accumulate=2))
    assert exit_codes(start(processes, root, 2, "two", {1: {"interrupt_at": 4}}, fsdp=fsdp)) == [130, 130]
    assert exit_codes(start(processes, root, 2, "two", fsdp=fsdp)) == [0, 0]
    torch.testing.assert_close(step_losses(root / "two"), step_losses(root / "one"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fsdp", [False, True])
def test_ranks_that_leave_out_samples_take_the_steps_of_one(processes: Any, root: Path, fsdp: bool):
    """Every sample of one rank's row, and one of another row: each rank sees other failures than the other."""
    _, clean = train_toy(options_of(root, "clean", accumulate=2))
    rows = clean._train
    gone = {rows._samples[i].sample_id for i in (*rows.rows[0], rows.rows[1][0])}
    (root / "storage").mkdir()
    with serve(
        root / "cache", root / "storage", lambda number, ids: "refuse" if sample_of(ids) in gone else "well"
    ) as server:
        online = {
            "hidden_states": None,
            "vllm_endpoint": (server.url,),
            "storage_path": root / "storage",
            "aux_layer_ids": (1, 2),
            "on_missing": "skip",
            "max_consecutive_failures": 20,
        }
        result, _ = train_toy(options_of(root, "one", accumulate=2, **online))
        assert exit_codes(start(processes, root, 2, "two", fsdp=fsdp, **online)) == [0, 0]
    assert list((root / "storage").iterdir()) == []
    assert (result.steps, result.skipped) == (clean.total_steps, len(gone))
    for run in ("one", "two"):
        assert {record.sample_id for record in read_skipped(root / run)} == gone
    torch.testing.assert_close(step_losses(root / "two"), step_losses(root / "one"), rtol=1e-5, atol=0)
    tokens = [[r.tokens for r in read_log(root / run) if isinstance(r, StepRecord)] for run in ("one", "two")]
    assert tokens[0] == tokens[1]


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_in_charge(processes: Any, root: Path):
    """Saves after every step, is killed at random moments, and must end like a run that nobody disturbed."""
    moments = random.Random(0)
    settings = {"save_every": 1, "validate_every": 8, "epochs": 6}
    _, undisturbed = train_toy(options_of(root, "calm", **settings))
    for _ in range(8):
        (victim,) = start(processes, root, 1, "run", **settings)
        time.sleep(moments.uniform(0.05, 0.4))
        victim.kill()
        victim.join()
        for checkpoint in all_checkpoints(root / "run"):
            read_tensors(checkpoint)
            RunFiles(root / "run").load(checkpoint)
    _, disturbed = train_toy(options_of(root, "run", **settings))
    pairs = zip(undisturbed.algorithm.module.parameters(), disturbed.algorithm.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert [r.step for r in read_log(root / "run") if r.kind == "step"] == list(range(1, undisturbed.total_steps + 1))
    assert not list((root / "run" / "checkpoints").glob(".*"))


def test_a_death_at_any_touch_of_a_file_while_saving_loses_nothing(processes: Any, root: Path):
    """The process ends at the 1st, 2nd, ... of the operations on files that a save, its choice of the best and its
    pruning take; each time the run holds a whole checkpoint, the old or the new one, and its next save tidies up."""
    train_toy(options_of(root, "before", save_every=1, validate_every=1, max_steps=3))
    folder = Path("checkpoints")
    (root / "before" / folder / "notes.txt").write_text("not ours")
    deaths = 0
    while True:
        run = root / "run"
        shutil.copytree(root / "before", run)
        dying = processes.Process(target=save_and_die, args=(run, deaths + 1))
        dying.start()
        dying.join(60)
        files = RunFiles(run)
        last = files.last()
        assert last in (files.path_of(3), files.path_of(4))
        assert files.best() in all_checkpoints(run)
        for checkpoint in all_checkpoints(run):
            read_tensors(checkpoint)
            files.load(checkpoint)
            files.state(checkpoint)
        if dying.exitcode == 0:
            break
        files.choose_best()
        files.prune(2)
        assert not list((run / folder).glob(".*"))
        assert len(all_checkpoints(run)) == 2
        assert (run / folder / "notes.txt").read_text() == "not ours"
        shutil.rmtree(run)
        deaths += 1
    assert (last, files.best()) == (files.path_of(4), files.path_of(4))
    assert deaths > 30, "it died at every one of them"


def test_what_a_kill_after_the_last_save_left_goes_at_the_next_start(root: Path):
    """Killed between the last save and the removal of an older checkpoint: nothing is left to save, still tidy."""
    train_toy(options_of(root))
    folder = root / "run" / "checkpoints"
    half = folder / ".step-00000001.4711.0123abcd.tmp"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("not ours")
    train_toy(options_of(root))
    assert not half.exists()
    assert (folder / "notes.txt").read_text() == "not ours"

"""Real processes: two gloo ranks equal one, an error on one ends all, and a kill at any moment loses no checkpoint."""

import multiprocessing
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_training import make_data, one_rank, options_of, train_toy

from speculators.checkpoint import all_checkpoints, read_tensors
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


def test_an_error_on_one_rank_ends_all(processes: Any, root: Path):
    _, trainer = train_toy(options_of(root, "clean", accumulate=2, max_steps=3))
    victim = trainer._train._samples[trainer._train.rows[trainer._schedule.slots(1)[1].row][0]].sample_id
    next((root / "cache").glob(f"*/{victim}.safetensors")).write_bytes(b"")
    assert exit_codes(start(processes, root, 2, "two")) == [2, 2]
    assert victim in (root / "error-1").read_text()
    assert "another rank has ended" in (root / "error-0").read_text()


@pytest.mark.parametrize("fsdp", [False, True])
def test_ranks_stop_together_and_continue_together(processes: Any, root: Path, fsdp: bool):
    train_toy(options_of(root, "one", accumulate=2))
    assert exit_codes(start(processes, root, 2, "two", {1: {"interrupt_at": 4}}, fsdp=fsdp)) == [130, 130]
    assert exit_codes(start(processes, root, 2, "two", fsdp=fsdp)) == [0, 0]
    torch.testing.assert_close(step_losses(root / "two"), step_losses(root / "one"), rtol=1e-5, atol=0)


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

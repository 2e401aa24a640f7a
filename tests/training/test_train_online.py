"""Training on states from servers, cached or in any mix: the same weights bit by bit, and nothing left behind."""

import os
from pathlib import Path
from typing import Any

import cache_server
import pytest
import torch
from toy_training import VERIFIER, make_data, options_of, train_toy
from unruly_server import ORDERLY, Script, UnrulyServer

from speculators.cli.options import resolve
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.samples import SPLITS, DataDirectory
from speculators.data.skipped import read_skipped
from speculators.errors import UserError
from speculators.training.log import StepRecord, read_log
from speculators.training.options import TrainOptions
from speculators.training.trainer import Trainer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_data(tmp_path)
    (tmp_path / "cache").rename(tmp_path / "full")
    (tmp_path / "storage").mkdir()
    return tmp_path


def serve(root: Path, script: Script = ORDERLY) -> UnrulyServer:
    """A server that gives what the full cache holds."""
    return cache_server.serve(root / "full", root / "storage", script)


def partial_cache(root: Path, name: str) -> Path:
    """A copy of the full cache that lacks every second sample."""
    full = HiddenStateCache.open(root / "full", VERIFIER, None)
    part = HiddenStateCache.create(root / name, full.manifest)
    data = DataDirectory(root / "data")
    for i, sample in enumerate(sample for split in SPLITS for sample in data.split(split)):
        if i % 2:
            part.write(sample.sample_id, full.read(sample.sample_id, sample.ids))
    return root / name


def online(root: Path, server: UnrulyServer, output: str, **changes: Any) -> TrainOptions:
    settings = {"vllm_endpoint": (server.url,), "storage_path": root / "storage", "aux_layer_ids": (1, 2)}
    return options_of(root, output, **{"hidden_states": None} | settings | changes)


def assert_same_bits(a: Trainer, b: Trainer) -> None:
    one, other = dict(a.algorithm.module.named_parameters()), dict(b.algorithm.module.named_parameters())
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def losses(run: Path) -> list[float]:
    return [record.loss for record in read_log(run) if isinstance(record, StepRecord)]


@pytest.fixture
def offline(root: Path) -> Trainer:
    return train_toy(options_of(root, "offline", hidden_states=root / "full"))[1]


def test_any_mix_trains_the_weights_of_a_full_cache_bit_by_bit(root: Path, offline: Trainer):
    begins_badly: Script = lambda number, ids: {2: "error", 3: "nan", 5: "hang_up", 8: "no_file"}.get(number, "well")  # noqa: E731
    with serve(root, begins_badly) as server:
        mixes = {
            "online": {},
            "hybrid": {"hidden_states": partial_cache(root, "half")},
            "kept": {"hidden_states": partial_cache(root, "growing"), "on_generate": "cache"},
            "new": {"hidden_states": root / "new-cache", "on_generate": "cache"},
        }
        for name, changes in mixes.items():
            result, trainer = train_toy(online(root, server, name, **changes))
            assert_same_bits(offline, trainer)
            assert losses(root / name) == losses(root / "offline")
            assert result.skipped == 0
            assert list((root / "storage").iterdir()) == []
        before = len(server.requests)
        for cache in ("growing", "new-cache"):
            _, trainer = train_toy(online(root, server, f"again-{cache}", hidden_states=root / cache))
            assert_same_bits(offline, trainer)
        assert len(server.requests) == before
    assert HiddenStateCache.open(root / "new-cache", VERIFIER, None).manifest.aux_layer_ids == (1, 2)


def test_interrupted_and_continued_online_equals_offline_and_leaves_nothing(root: Path, offline: Trainer):
    with serve(root) as server:
        with pytest.raises(KeyboardInterrupt):
            train_toy(online(root, server, "parts"), interrupt_at=5)
        assert list((root / "storage").iterdir()) == []
        _, resumed = train_toy(online(root, server, "parts"))
    assert_same_bits(offline, resumed)


def test_left_out_samples_change_no_step_and_are_counted(root: Path, offline: Trainer):
    data = DataDirectory(root / "data").split("train")
    rows = offline._train
    gone = {rows._samples[i].sample_id for i in rows.rows[0]}
    script: Script = lambda number, ids: "refuse" if cache_server.sample_of(ids) in gone else "well"  # noqa: E731
    with serve(root, script) as server:
        result, trainer = train_toy(online(root, server, "skipping", on_missing="skip", max_consecutive_failures=20))
    assert (result.steps, result.skipped) == (offline.total_steps, len(gone))
    assert {record.sample_id for record in read_skipped(root / "skipping")} == gone
    kept = sum(len(sample.ids) for sample in data if sample.sample_id not in gone)
    assert result.tokens == kept * trainer.options.epochs
    steps = [record for record in read_log(root / "skipping") if isinstance(record, StepRecord)]
    assert [record.step for record in steps if not record.targets] == [
        step + 1 for step in range(result.steps) if trainer._schedule.slots(step)[0].row == 0
    ]


def test_a_server_that_stays_broken_ends_the_run_with_one_sentence(root: Path):
    with serve(root, lambda number, ids: "error" if number > 5 else "well") as server:
        words = rf"^{server.url}: no hidden states for sample \w+ .*after 2 failed requests in a row; .*out of luck"
        with pytest.raises(UserError, match=words):
            train_toy(online(root, server, "run", max_consecutive_failures=2))
        with pytest.raises(UserError, match="3 samples in a row were left out"):
            train_toy(online(root, server, "run", on_missing="skip", max_consecutive_failures=3))
    assert list((root / "storage").iterdir()) == []


REQUIRED = {"verifier": "v", "data": "d", "output": "o", "speculator_type": "eagle3"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "--hidden-states is missing"),
        ({"vllm_endpoint": "http://x"}, "--vllm-endpoint needs --storage-path"),
        ({"vllm_endpoint": "auto,http://x", "storage_path": "s"}, "auto alone"),
        ({"hidden_states": "h", "on_missing": "generate"}, "--on-missing generate needs a server"),
        ({"vllm_endpoint": "auto", "on_generate": "cache"}, "--on-generate cache needs --hidden-states"),
        ({"vllm_endpoint": "auto", "on_missing": "raise"}, "--hidden-states is missing"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        resolve(TrainOptions, REQUIRED | given).check()


def test_an_endpoint_means_generate_and_none_means_raise():
    asked = resolve(TrainOptions, REQUIRED | {"vllm_endpoint": "http://a,http://b", "storage_path": "s"})
    asked.check()
    assert (asked.vllm_endpoint, asked.missing_policy) == (("http://a", "http://b"), "generate")
    assert resolve(TrainOptions, REQUIRED | {"hidden_states": "h"}).missing_policy == "raise"
    assert resolve(TrainOptions, REQUIRED | {"hidden_states": "h"}).settings() == asked.settings()


def test_auto_is_refused_for_several_processes(monkeypatch: pytest.MonkeyPatch):
    from speculators.cli.train import run

    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(UserError, match="auto starts a server for one process"):
        run(resolve(TrainOptions, REQUIRED | {"vllm_endpoint": "auto"}))

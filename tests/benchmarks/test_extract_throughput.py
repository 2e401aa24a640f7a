"""Ratios stay within a round, waiting is weighed by time, and both sides ask a server for the same samples."""

import json
import re
from pathlib import Path

import pytest
from data_directories import random_samples, write_samples
from extract_throughput import ExtractThroughputOptions, measure
from extraction_result import ExtractionRun, Side, TrainingRun, compare, memory_over, training_run, verdict
from extraction_server import HIDDEN, ExtractionServer

from speculators.cli.options import resolve
from speculators.errors import UserError
from speculators.training.log import StepRecord
from speculators.verifier import Verifier


def run(side: Side, seconds: float) -> ExtractionRun:
    return ExtractionRun(side=side, tokens=1000, seconds=seconds)


def test_a_sides_ratio_is_taken_round_by_round_whatever_the_order() -> None:
    runs = [run("ours", 2), run("bare", 1), run("upstream", 4), run("bare", 5), run("upstream", 10), run("ours", 5)]
    ours, bare, upstream = compare(runs)
    assert [side.side for side in (ours, bare, upstream)] == ["ours", "bare", "upstream"]
    assert (bare.ours_over_it.low, bare.ours_over_it.high) == (0.5, 1.0)
    assert (upstream.ours_over_it.low, upstream.ours_over_it.high) == (2.0, 2.0)
    assert ours.tokens_per_s == (500 + 200) / 2


def step(tokens: int, seconds: float, wait_share: float) -> StepRecord:
    return StepRecord(
        step=1, epoch=0, loss=0, grad_norm=0, lr=0, acceptance_length=1, tokens=tokens, targets=1,
        tokens_per_s=tokens / seconds, data_wait_share=wait_share, memory_bytes=0, metrics={},
    )  # fmt: skip


def test_waiting_is_weighed_by_time_and_the_first_steps_do_not_count() -> None:
    memory = memory_over([100], [0])
    trained = training_run([step(50, 100, 1.0), step(100, 1, 0.0), step(100, 3, 2 / 3)], memory, warmup=1)
    assert trained.wait_share == pytest.approx(0.5)
    assert trained.tokens_per_s == pytest.approx(50)
    assert trained.own_tokens_per_s == pytest.approx(100)
    assert trained.steps == 3


def test_memory_is_compared_between_the_first_and_the_last_quarter() -> None:
    memory = memory_over([100, 100, 900, 120, 120, 120, 110, 110], [0, 7, 3])
    assert (memory.start_bytes, memory.end_bytes, memory.peak_bytes, memory.storage_peak_bytes) == (100, 110, 900, 7)
    assert memory.growth == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("server", "share", "words"),
    [(200.0, 0.05, "asked for, as required"), (200.0, 0.2, "NOT as required"), (90.0, 0.5, "has to wait; .* 50.0%")],
)
def test_a_trainer_may_wait_for_a_server_that_is_slower_than_itself(server: float, share: float, words: str) -> None:
    online = TrainingRun(steps=9, tokens_per_s=80, own_tokens_per_s=100, wait_share=share, memory=memory_over([1], [0]))
    assert re.search(words, verdict(server, online))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    config = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2) | {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 16, "num_hidden_layers": 6, "vocab_size": 64,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "verifier").mkdir()
    (tmp_path / "verifier" / "config.json").write_text(json.dumps(config))
    splits = {"train": random_samples(64, range(3, 20)), "validation": random_samples(64, (5,))}
    write_samples(tmp_path / "data", Verifier.read(tmp_path / "verifier"), splits, max_length=32)
    (tmp_path / "storage").mkdir()
    return tmp_path


def test_every_side_asks_for_every_sample_once_a_round_and_leaves_nothing(place: Path) -> None:
    with ExtractionServer(place / "storage", 4) as server:
        result = measure(
            resolve(
                ExtractThroughputOptions,
                {
                    "verifier": str(place / "verifier"), "data": str(place / "data"), "aux_layer_ids": "1,3,4",
                    "samples": 10, "rounds": 1, "concurrency": 3, "endpoint": server.url,
                    "storage_path": str(place / "storage"),
                },
            )
        )  # fmt: skip
    asked = [tuple(ids) for ids in server.requests]
    assert (result.samples, result.tokens) == (10, sum(range(3, 13)))
    assert sorted({asked.count(ids) for ids in asked}) == [2, 3], "two rounds, and a warm-up of the first eight"
    assert [(run.side, run.tokens) for run in result.runs] == [("ours", result.tokens), ("bare", result.tokens)]
    assert list((place / "storage").iterdir()) == []


def test_a_server_without_its_directory_is_refused() -> None:
    with pytest.raises(UserError, match="--endpoint needs --storage-path"):
        resolve(ExtractThroughputOptions, {"verifier": "v", "data": "d", "endpoint": "http://x"})

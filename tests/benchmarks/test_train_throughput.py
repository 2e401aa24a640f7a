"""Ratios pair runs that followed one another, failures never turn into numbers, and both sides get the same job."""

import json

import pytest
from throughput_result import Point, Run, Side, summarise
from train_throughput import ThroughputOptions, points
from training_job import Job, Measured

from speculators.cli.options import resolve

BASE = Point(algorithm="eagle3", row_length=1024, max_anchors=128, draft_vocab_size=8192)


def run(side: Side, speed: float, peak: int, point: Point = BASE) -> Run:
    return Run(point=point, side=side, tokens_per_s=speed, peak_over_resident_bytes=peak, resident_bytes=1)


def options(**values: object) -> ThroughputOptions:
    paths = {"data": "d", "hidden_states": "h", "verifier": "v"}
    return resolve(ThroughputOptions, {**paths, **values})


def test_ratio_is_taken_pair_by_pair_with_its_spread() -> None:
    runs = [run("ours", 300, 50), run("upstream", 100, 100), run("ours", 200, 60), run("upstream", 50, 100)]
    runs += [run("ours", 100, 40), run("upstream", 50, 100)]
    (summary,) = summarise(runs)
    assert summary.speed is not None
    assert (summary.speed.median, summary.speed.low, summary.speed.high) == (3.0, 2.0, 4.0)
    assert summary.memory is not None
    assert (summary.memory.median, summary.memory.low, summary.memory.high) == (0.5, 0.4, 0.6)
    assert summary.ours_tokens_per_s == 200


def test_a_failed_run_leaves_its_side_and_ratio_empty() -> None:
    large = BASE.model_copy(update={"row_length": 8192})
    runs = [run("ours", 3, 1), run("upstream", 1, 1), run("ours", 2, 1, large)]
    base, grown = summarise([*runs, Run(point=large, side="upstream", failed="killed")])
    assert base.speed is not None
    assert (grown.upstream_tokens_per_s, grown.speed, grown.memory) == (None, None, None)
    assert grown.ours_tokens_per_s == 2


def test_warm_up_steps_do_not_count() -> None:
    measured = Measured(
        step_s=(100.0, 1.0, 3.0), tokens=(10, 20, 60), losses=(), resident_bytes=5, peak_bytes=9, checkpoints=(),
        packages={},
    )  # fmt: skip
    assert measured.tokens_per_s(warmup=1) == 20.0
    assert measured.peak_over_resident_bytes == 4


def test_growth_varies_one_size_at_a_time_and_stays_inside_the_verifiers_vocabulary() -> None:
    asked = options(algorithms="eagle3,dflash", grow=["length", "anchors", "vocabulary"])
    found = list(points(asked, full_vocabulary=49152))
    bases = {p.algorithm: p for p in reversed(found)}
    for point in found:
        base = bases[point.algorithm].model_dump()
        assert sum(base[field] != value for field, value in point.model_dump().items()) <= 1
    assert max(p.draft_vocab_size for p in found) == 49152
    assert {p.max_anchors for p in found if p.algorithm == "eagle3"} == {128}
    assert {p.row_length for p in found} == {512, 1024, 2048, 4096, 8192}


def test_a_job_survives_the_way_to_the_other_interpreter() -> None:
    job = Job(
        algorithm="dflash", verifier="v", data="d", hidden_states="h", rows="r", output="o", steps=3,
        overrides={"loss_fn": '{"ce": 1.0}', "lr": 1e-3},
    )  # fmt: skip
    assert Job.model_validate_json(json.dumps(job.model_dump())) == job
    with pytest.raises(ValueError, match="extra"):
        Job.model_validate({**job.model_dump(), "unknown": 1})

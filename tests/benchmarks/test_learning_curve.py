"""Candidates are compared where the shortest curve of their algorithm ends; checkpoints carry what led up to them."""

from pathlib import Path

import pytest
from curves import Curve, CurvePoint, length_at, plot, standings
from learning_curve import CANDIDATES, LearningOptions, points_of
from own_driver import options_of
from training_job import Job, Measured, make_job


def curve(name: str, seed: int, *points: tuple[int, float, float]) -> Curve:
    made = tuple(CurvePoint(step=i, tokens=t, seconds=s, acceptance_length=a) for i, (t, s, a) in enumerate(points, 1))
    return Curve(candidate=name, algorithm="eagle3", seed=seed, steps=len(points), points=made)


SLOW = curve("slow", 0, (100, 10.0, 1.4), (200, 20.0, 1.8))
FAST = curve("fast", 0, (100, 2.0, 1.2), (200, 4.0, 1.6))


def test_equal_seconds_and_equal_tokens_rank_differently() -> None:
    by_seconds, by_tokens = standings([SLOW, FAST], "seconds"), standings([SLOW, FAST], "tokens")
    assert [s.candidate for s in by_seconds] == ["fast", "slow"]
    assert [s.candidate for s in by_tokens] == ["slow", "fast"]
    assert by_seconds[0].at == 4.0
    assert by_seconds[1].lengths == (pytest.approx(1.16),)


def test_a_curve_starts_where_nothing_is_accepted_and_passes_its_points() -> None:
    assert length_at(SLOW, "seconds", 0.0) == 1.0
    assert length_at(SLOW, "seconds", 5.0) == pytest.approx(1.2)
    assert length_at(SLOW, "tokens", 200) == 1.8


def test_seeds_of_a_candidate_stand_together() -> None:
    again = curve("fast", 1, (100, 2.0, 1.3), (200, 4.0, 1.7))
    (first, _) = standings([SLOW, FAST, again], "seconds")
    assert (first.candidate, first.lengths, first.median) == ("fast", (1.6, 1.7), pytest.approx(1.65))


def test_a_checkpoint_carries_the_tokens_and_seconds_up_to_its_step() -> None:
    measured = Measured(
        step_s=(1.0, 2.0, 3.0), tokens=(10, 20, 30), losses=(), resident_bytes=0, peak_bytes=0,
        checkpoints=("x/step-00000002", "x/step-00000003"), packages={},
    )  # fmt: skip
    assert [(p.step, p.tokens, p.seconds) for p in points_of(measured, [1.1, 1.2])] == [(2, 30, 3.0), (3, 60, 6.0)]


def test_the_plot_names_every_candidate(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plot([SLOW, FAST], tmp_path / "curves.html")
    page = (tmp_path / "curves.html").read_text(encoding="utf-8")
    assert '"name":"slow"' in page
    assert '"name":"fast"' in page


@pytest.mark.parametrize("name", [name for name, candidate in CANDIDATES.items() if not candidate.upstream])
def test_our_candidates_are_valid_training_options(name: str) -> None:
    candidate = CANDIDATES[name]
    job = Job(
        algorithm=candidate.algorithm, verifier="v", data="d", hidden_states="h", rows="r", output="o", steps=3,
        overrides=candidate.overrides,
    )  # fmt: skip
    options = options_of(job)
    assert options.speculator_type == candidate.algorithm
    for field, value in candidate.overrides.items():
        assert getattr(options, field) == value


def test_a_job_has_the_usual_shape_unless_told_otherwise() -> None:
    options = LearningOptions(data=Path("d"), hidden_states=Path("h"), verifier="v", output=Path("o"))
    job = make_job("dflash", options, Path("run"), steps=3, block_size=4)
    assert (job.num_layers, job.block_size, job.steps) == (2, 4, 3)
    assert (job.data, job.hidden_states, job.verifier, job.output) == ("d", "h", "v", "run/run")
    assert make_job("eagle3", options, Path("run"), steps=3).num_layers == 1

"""The best K follows from step times and the acceptance curve; "do not speculate" is an answer."""

import pytest

from bench.compare import ALL_TASKS, Comparison, Estimate
from bench.conditions import Variant
from bench.cost import Decision, break_evens, decisions, step_times
from bench.metrics import summarise
from bench.records import RequestRecord
from bench.schedule import schedules
from bench.summary import Cell
from speculators.acceptance import Acceptance

PLAIN_S = 0.03


def cell(variant: str, histogram: tuple[int, ...] | None, step_s: float, point: str = "c1") -> Cell:
    """A cell whose numbers follow from the step time."""
    acceptance = Acceptance.from_histogram(histogram) if histogram else None
    tpot = step_s / (acceptance.length if acceptance else 1)
    record = RequestRecord(variant=variant, task="gsm8k", prompt_id="0", tpot_s=tpot, acceptance=acceptance)
    names = {"task": "gsm8k", "variant": variant}
    bounds = {"low": None, "high": None, "num_prompts": 9}
    speed = Comparison(**names, reference="baseline", estimate=PLAIN_S / tpot, p_value=0, verdict="better", **bounds)  # type: ignore[arg-type]
    return Cell(
        **names,
        point=point,
        metrics=summarise([record]),
        acceptance_length=None,
        time_per_token=Estimate(metric="tpot_s", estimate=tpot, **names, **bounds),  # type: ignore[arg-type]
        speed_up=speed if histogram else None,
        marginal=(),
        conditional=(),
    )


def decide(algorithm: str, *measured: tuple[str, int, tuple[int, ...], float]) -> Decision:
    variants = [Variant(name="baseline", verifier="v")]
    variants += [
        Variant(name=name, verifier="v", draft="d", algorithm=algorithm, num_speculative_tokens=k)
        for name, k, _, _ in measured
    ]
    cells = [cell("baseline", None, PLAIN_S), *(cell(name, h, s) for name, _, h, s in measured)]
    found = decisions(variants, cells, {v.name: "baseline" for v in variants[1:]}, 0.03)
    assert len(found) == 1
    return found[0]


USELESS_TAIL = (20, 60, 20, 0, 0, 0)  # the fourth and later positions are never accepted


def test_a_chain_is_cut_where_later_positions_cost_more_than_they_bring() -> None:
    slow = decide("eagle3", ("eagle3", 5, USELESS_TAIL, 0.06))
    assert (slow.best_k, slow.measured) == (1, False)
    step_s = PLAIN_S + (0.06 - PLAIN_S) * 1 / 5
    assert slow.expected_speedup == pytest.approx(PLAIN_S / step_s * 1.8)
    assert "cutting off" in slow.reason


def test_a_block_draft_is_judged_at_measured_k_only() -> None:
    alone = decide("dflash", ("dflash", 5, USELESS_TAIL, 0.045))
    assert (alone.best_k, alone.measured) == (5, True)
    assert "would have to be measured" in alone.reason
    both = decide("dflash", ("dflash", 5, USELESS_TAIL, 0.045), ("dflash@2", 2, (20, 60, 20), 0.035))
    assert (both.best_k, both.variant) == (2, "dflash")
    assert both.expected_speedup == pytest.approx(PLAIN_S / 0.035 * 2)


def test_do_not_speculate_is_an_answer() -> None:
    found = decide("dflash", ("dflash", 2, (90, 5, 5), 0.04))
    assert found.best_k == 0
    assert found.reason.startswith("Do not speculate here")


@pytest.mark.parametrize(("gains", "at"), [((1.5, 0.5), 2.0), ((1.5, 1.2), None), ((0.9, 0.8), 1.0)])
def test_break_even_lies_where_the_gain_crosses_one(gains: tuple[float, float], at: float | None) -> None:
    found = [
        Decision(
            variant="a", task=ALL_TASKS, point=p, best_k=1, expected_speedup=gain, measured=True, reason="measured"
        )
        for p, gain in zip(("c1", "c4"), gains, strict=True)
    ]
    assert [row.concurrency for row in break_evens(found)] == [at if at is None else pytest.approx(at)]


def scheduled(algorithm: str, *best: tuple[int, int]) -> list[tuple[tuple[int, int, int], ...]]:
    found = [
        Decision(
            variant="a",
            task=ALL_TASKS,
            point=f"c{at}",
            best_k=k,
            expected_speedup=1.2,
            measured=True,
            reason="measured",
        )
        for at, k in best
    ]
    draft = Variant(name="a", verifier="v", draft="d", algorithm=algorithm, num_speculative_tokens=5)
    return [schedule.ranges for schedule in schedules(found, [draft])]


def test_a_schedule_covers_every_batch_size_up_to_the_largest_once_and_starts_at_one() -> None:
    (ranges,) = scheduled("eagle3", (16, 0), (1, 5), (2, 5), (4, 3))
    assert ranges == ((1, 2, 5), (3, 8, 3), (9, 16, 0))
    (ranges,) = scheduled("eagle3", (1, 2), (64, 0))
    assert ranges == ((1, 8, 2), (9, 64, 0))


def test_a_schedule_says_only_what_one_number_cannot_and_what_was_measured() -> None:
    assert scheduled("eagle3", (1, 3), (4, 3)) == []
    assert scheduled("eagle3", (1, 0), (4, 0)) == []
    assert scheduled("eagle3", (1, 3)) == []
    assert scheduled("dflash", (1, 7), (4, 3)) == [], "a smaller K under a schedule is cut off, not measured"
    assert scheduled("dflash", (1, 7), (4, 0)) == [((1, 2, 7), (3, 4, 0))]


def test_step_times_are_the_cost_model_by_load_and_k() -> None:
    variants = [Variant(name="baseline", verifier="v")]
    variants += [Variant(name="e", verifier="v", draft="d", algorithm="eagle3", num_speculative_tokens=5)]
    cells = [cell("baseline", None, PLAIN_S), cell("e", USELESS_TAIL, 0.06)]
    cells = [c.model_copy(update={"task": ALL_TASKS}) for c in cells]
    rows = step_times(variants, cells, {"e": "baseline"})
    assert [(r.variant, r.num_speculative_tokens, pytest.approx(r.step_s)) for r in rows] == [
        ("baseline", 0, PLAIN_S),
        ("e", 5, 0.06),
    ]

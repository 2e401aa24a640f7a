"""Verdicts, pairing and the comparison of outputs."""

import math

import numpy as np
import pytest

from bench.audit import first_difference, losslessness
from bench.compare import ALL_TASKS, acceptance_length, speed_ups, time_per_token, verdict_of
from bench.metrics import length_by_request, pooled_acceptance, spread, summarise
from bench.pairing import paired_log_ratios
from bench.records import RequestRecord
from speculators.acceptance import Acceptance


def record(variant: str, prompt: int | str, tpot_s: float | None = 0.03, **fields: object) -> RequestRecord:
    given = {"variant": variant, "task": "gsm8k", "prompt_id": str(prompt), "tpot_s": tpot_s, **fields}
    return RequestRecord.model_validate(given)


def simulated(variant: str, seed: int, speed_up: float, tasks: tuple[str, ...], n: int = 20) -> list[RequestRecord]:
    """Prompts have their own speed, requests their own noise."""
    prompts, noise = np.random.default_rng(1000 + seed), np.random.default_rng(hash((variant == "a", seed)) % 2**32)
    return [
        record(variant, p, 0.03 * prompts.lognormal(0, 0.3) / speed_up * noise.lognormal(0, 0.05), task=task)
        for task in tasks
        for p in range(n)
    ]


def test_the_speed_up_is_the_geometric_mean_of_paired_ratios() -> None:
    base = [record("baseline", i, t) for i, t in enumerate([0.030, 0.020, 0.040, 0.010, 0.050])]
    mine = [record("a", i, t) for i, t in enumerate([0.015, 0.020, 0.020, 0.010, 0.025])]
    comparison = speed_ups(mine, base, ["gsm8k"], 0.03)[0]
    assert comparison.estimate == pytest.approx(2 ** (3 / 5))
    assert comparison.num_prompts == 5


def test_swapping_the_sides_inverts_the_speed_up() -> None:
    a, b = simulated("a", 0, 1.3, ("gsm8k",)), simulated("baseline", 0, 1.0, ("gsm8k",))
    forward, backward = speed_ups(a, b, ["gsm8k"], 0.03)[0], speed_ups(b, a, ["gsm8k"], 0.03)[0]
    assert forward.estimate * backward.estimate == pytest.approx(1)
    assert (forward.verdict, backward.verdict) == ("better", "worse")


def test_a_failure_takes_its_counterpart_out_of_the_pairs() -> None:
    base = [record("baseline", i, 0.03) for i in range(6)]
    mine = [record("a", i, 0.02) if i else record("a", i, None, error="500") for i in range(6)]
    assert set(paired_log_ratios(mine, base)) == {("gsm8k", str(i)) for i in range(1, 6)}
    assert paired_log_ratios(mine, base)["gsm8k", "1"] == pytest.approx(math.log(1.5))


def test_turns_and_repeats_of_a_prompt_are_one_cluster() -> None:
    base = [record("baseline", 0, 0.04, turn=t, repeat=r) for t in (0, 1) for r in (0, 1)]
    mine = [record("a", 0, 0.04 / (2 if t else 1), turn=t, repeat=r) for t in (0, 1) for r in (0, 1)]
    assert paired_log_ratios(mine, base) == {("gsm8k", "0"): pytest.approx(math.log(2) / 2)}


@pytest.mark.parametrize(
    ("low", "high", "significant", "verdict"),
    [
        (1.10, 1.20, True, "better"),
        (0.80, 0.90, True, "worse"),
        (0.99, 1.02, False, "equivalent"),
        (1.01, 1.02, True, "equivalent"),
        (0.90, 1.20, False, "inconclusive"),
        (1.001, 1.20, False, "inconclusive"),
        (None, None, False, "inconclusive"),
    ],
)
def test_verdicts(low: float | None, high: float | None, significant: bool, verdict: str) -> None:
    estimate = math.sqrt(low * high) if low and high else 1.5
    assert verdict_of(low, high, estimate, significant, 0.03) == verdict


def test_two_equal_variants_are_rarely_called_different() -> None:
    tasks = ("gsm8k", "mbpp", "nq")
    different = 0
    for seed in range(80):
        verdicts = {
            c.verdict
            for c in speed_ups(simulated("a", seed, 1, tasks), simulated("baseline", seed, 1, tasks), tasks, 0.0001)
            if c.task != ALL_TASKS
        }
        different += bool(verdicts & {"better", "worse"})
    assert different / 80 <= 0.07


def test_a_real_difference_is_found() -> None:
    tasks = ("gsm8k", "mbpp")
    comparisons = speed_ups(simulated("a", 1, 1.2, tasks), simulated("baseline", 1, 1, tasks), tasks, 0.03)
    assert {c.task: c.verdict for c in comparisons} == {"gsm8k": "better", "mbpp": "better", ALL_TASKS: "better"}
    assert all(c.low is not None and c.high is not None and c.low < 1.2 < c.high for c in comparisons)


def test_no_common_prompt_is_no_comparison() -> None:
    assert speed_ups([record("a", 1)], [record("baseline", 2)], ["gsm8k"], 0.03) == []


def test_acceptance_length_by_step_and_by_request_differ_as_defined() -> None:
    long = Acceptance.from_histogram([0, 100])  # 100 steps of 2 tokens
    short = Acceptance.from_histogram([10, 0])  # 10 steps of 1 token
    records = [record("a", 0, acceptance=long), record("a", 1, acceptance=short)]
    estimate = acceptance_length(records, "gsm8k", "a")
    assert estimate is not None
    assert estimate.estimate == pytest.approx(210 / 110)
    assert pooled_acceptance(records) == long + short
    assert length_by_request(records) == pytest.approx(1.5)


def test_failed_requests_are_counted_and_never_averaged() -> None:
    records = [
        record("a", 0, 0.02, ttft_s=0.1, e2e_s=1.0, output_tokens=50),
        record("a", 1, 9.0, ttft_s=9.0, e2e_s=9.0, output_tokens=1, error="dropped"),
    ]
    metrics = summarise(records)
    assert (metrics.num_requests, metrics.num_failed) == (2, 1)
    assert metrics.tpot_s is not None
    assert metrics.tpot_s.mean == pytest.approx(0.02)
    assert metrics.output_tokens_per_s == pytest.approx(50)
    estimate = time_per_token(records, "gsm8k", "a")
    assert estimate is not None
    assert estimate.num_prompts == 1


def test_counters_stand_in_only_where_requests_tell_nothing() -> None:
    counters = Acceptance.from_histogram([5, 5])
    assert summarise([record("a", 0)], counters).acceptance_from_counters
    told = summarise([record("a", 0, acceptance=Acceptance.from_histogram([1, 2]))], counters)
    assert told.acceptance == Acceptance.from_histogram([1, 2])
    assert not told.acceptance_from_counters


def test_spread_of_nothing_is_nothing() -> None:
    assert spread([None, None]) is None


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [((1, 2, 3), (1, 2, 3), None), ((1, 2, 3), (1, 9, 3), 1), ((1, 2), (1, 2, 3), 2), ((), (), None), ((), (4,), 0)],
)
def test_first_difference(a: tuple[int, ...], b: tuple[int, ...], position: int | None) -> None:
    assert first_difference(a, b) == first_difference(b, a) == position


def test_outputs_are_compared_by_tokens_where_both_sides_tell_them() -> None:
    base = [record("baseline", i, token_ids=(1, 2, 3), text="abc") for i in range(3)]
    mine = [record("a", 0, token_ids=(1, 2, 3)), record("a", 1, token_ids=(1, 2, 4)), record("a", 2, error="500")]
    audit = losslessness(mine, base)
    assert audit is not None
    assert (audit.unit, audit.compared, audit.equal, audit.first_differences) == ("tokens", 2, 1, (2,))
    by_text = losslessness([record("a", 0, text="abX")], base)
    assert by_text is not None
    assert (by_text.unit, by_text.first_differences) == ("characters", (2,))


def test_no_acceptance_length_is_below_one_and_an_open_question_needs_more_prompts() -> None:
    """Six prompts, one of them long: a studentised interval alone would reach below what is possible."""
    steps = [(60, 30), (2, 2), (2, 2), (3, 2), (2, 2), (400, 120)]
    drafted = [
        record("dflash", i, acceptance=Acceptance(histogram=(n - a // 7, *[0] * 6, a // 7), drafted=7 * n))
        for i, (n, a) in enumerate(steps)
    ]
    found = acceptance_length(drafted, "t", "dflash")
    assert found is not None
    assert found.low is not None
    assert 1 <= found.low < found.estimate
    rng = np.random.default_rng(3)
    sides = [
        [record(name, i, tpot_s=0.03 * math.exp(rng.normal(0, 0.05))) for i in range(6)] for name in ("a", "baseline")
    ]
    (*_, pooled) = speed_ups(*sides, ["t"], margin=0.03)
    assert pooled.verdict == "inconclusive"
    assert pooled.prompts_needed is not None
    assert pooled.prompts_needed > pooled.num_prompts

"""The losslessness audit: margins at first differences tell rounding from wrong tokens; FP8 is held against FP8."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_server import Script, chunk, server, usage
from test_bench_report import make_run, row
from test_bench_variants import VERIFIER, options

from bench.audit import (
    NEAR_TIE_NATS,
    Losslessness,
    Margin,
    audit_sentence,
    audited_against,
    closed_with,
    losslessness,
)
from bench.conditions import Outcome, Variant
from bench.margins import MARGINS_FILE, ask_margins, read_margins, to_ask
from bench.records import BenchRun, RecordWriter, RequestRecord, read_records
from bench.report import build
from bench.run import run_bench
from serve.endpoint import Endpoint
from speculators.schema import write_json

OWN, OTHER = (5, 6, 7, 8), (5, 6, 9, 8)
VARIANTS = (
    Variant(name="baseline", verifier="v"),
    Variant(name="dflash", verifier="v", draft="d"),
    Variant(name="fp8", verifier="v8", fp8=True),
    Variant(name="dflash+fp8", verifier="v8", fp8=True, draft="d"),
)


def outputs(variant: str, differing: int = 0, count: int = 40, **more: Any) -> list[RequestRecord]:
    """Greedy outputs of which the first `differing` leave the others' at position 2."""
    more = {"prompt_token_ids": (1, 2), **more}
    return [row(variant, "t", i, 0.01, token_ids=OTHER if i < differing else OWN, **more) for i in range(count)]


def audited(differing: int, nats: list[float], floor: list[RequestRecord] | None = None) -> Losslessness:
    mine = outputs("a", differing)
    margins = {record.key: Margin(2, value) for record, value in zip(mine, nats, strict=False)}
    repeated = outputs("baseline", pass_index=1) if floor is None else floor
    found = losslessness(mine, outputs("baseline"), repeated, margins)
    assert found is not None
    return found


def test_rounding_at_near_ties_is_no_loss_however_often_it_happens() -> None:
    found = audited(20, [0.125, 0.0, -0.25] * 7)
    assert found.verdict == "near ties"
    assert found.margins[-1] == 0.125
    assert "nearly tied" in audit_sentence(found)
    assert "0.12 at most" in audit_sentence(found)
    assert audited(20, [0.1] * 20, floor=[]).verdict == "near ties", "margins speak without a repeat as well"


def test_one_wrong_token_is_enough_and_unknown_margins_prove_nothing() -> None:
    assert audited(1, [3.0]).verdict == "differs"
    assert audited(20, [0.1] * 19).verdict == "differs"
    assert audited(20, [0.1] * 19, floor=[]).verdict == "unknown"
    assert audited(1, [NEAR_TIE_NATS]).verdict == "within noise"


def test_the_floors_own_margins_move_the_limit() -> None:
    mine, repeated = outputs("a", 2), outputs("baseline", 2, pass_index=1)
    margins = {r.key: Margin(2, 1.5) for r in mine} | {r.key: Margin(2, 1.6) for r in repeated}
    found = losslessness(mine, outputs("baseline"), repeated, margins)
    assert found is not None
    assert (found.verdict, found.floor_margins) == ("within noise", (1.6, 1.6))


def test_a_margin_of_another_position_is_not_this_ones() -> None:
    mine = outputs("a", 1)
    found = losslessness(mine, outputs("baseline"), (), {mine[0].key: Margin(3, 9.0)})
    assert found is not None
    assert found.margins == ()


def test_drafts_on_fp8_are_held_against_the_plain_fp8_server_which_is_measured_again_too() -> None:
    against = {v.name: audited_against(v, VARIANTS, "baseline") for v in VARIANTS}
    assert against == {"baseline": "baseline", "dflash": "baseline", "fp8": "baseline", "dflash+fp8": "fp8"}
    assert audited_against(VARIANTS[3], (VARIANTS[0], VARIANTS[3]), "baseline") is None
    assert closed_with(VARIANTS, "baseline") == ["baseline", "fp8"]
    assert closed_with(VARIANTS[:3], "baseline") == ["baseline"]


class Telling(Script):
    """A server that gives log-probabilities of the tokens it is asked for."""

    def completion(self, request: dict[str, Any]) -> Any:
        token, other = request["logprob_token_ids"]
        told = {f"token_id:{token}": -0.5, f"token_id:{other}": -0.75}
        return {"choices": [{"logprobs": {"top_logprobs": [told]}}]}


def test_the_plain_server_is_asked_once_for_each_difference_with_the_shared_prefix(tmp_path: Path) -> None:
    records = [*outputs("baseline"), *outputs("dflash", 2), *outputs("baseline", 1, pass_index=1), *outputs("fp8", 3)]
    differences = to_ask("baseline", VARIANTS, records, {})
    assert [d.mine.variant for d in differences] == ["baseline", *["dflash"] * 2, *["fp8"] * 3]
    script = Telling([])
    with server(script) as url:
        assert ask_margins(Endpoint(url, "m"), differences, tmp_path) == 6
    asked = script.requests[1]
    assert (asked["prompt"], asked["logprob_token_ids"], asked["max_tokens"]) == ([1, 2, 5, 6], [7, 9], 1)
    known = read_margins(tmp_path)
    assert known[outputs("dflash")[0].key] == Margin(2, 0.25)
    assert to_ask("baseline", VARIANTS, records, known) == []
    renamed = read_margins(tmp_path, {"dflash": "dflash (run 2)"})
    assert {key.variant for key in renamed} == {"dflash (run 2)"}


def test_a_run_asks_its_baseline_at_the_end_and_once_only(tmp_path: Path) -> None:
    write_json(tmp_path / "verifier" / "config.json", VERIFIER)
    first = {**chunk(""), "prompt_token_ids": [1, 2]}

    def script(last: int) -> Telling:
        events = [first, chunk("a", [5]), chunk("b", [last], "length"), usage(2), "[DONE]"]
        return Telling([(0.0, event) for event in events])

    plain = script(7)
    with server(plain) as url, server(script(9)) as other:
        compare = (f"baseline={url}", f"mine={other}")
        given = options(tmp_path, compare=compare, verifier=str(tmp_path / "verifier"), num_prompts=5)
        run_bench(given, Console(quiet=True))
        asked = [request for request in plain.requests if "logprob_token_ids" in request]
        assert [(r["prompt"], r["logprob_token_ids"]) for r in asked] == [([1, 2, 5], [7, 9])] * 5
        sent = len(plain.requests)
        run_bench(given, Console(quiet=True))
        assert len(plain.requests) == sent, "what is known is not asked again"
    (audit,) = build(given.output).losslessness
    assert (audit.verdict, audit.equal, audit.margins) == ("near ties", 0, (0.25,) * 5)
    assert (audit.floor_equal, audit.floor_compared) == (3, 3)


def test_an_output_that_ended_has_no_second_token_and_is_not_asked_about() -> None:
    short = [r.model_copy(update={"token_ids": OWN[:2]}) for r in outputs("dflash", count=3)]
    assert to_ask("baseline", VARIANTS, [*outputs("baseline", count=3), *short], {}) == []


@pytest.mark.parametrize("answer", [{}, {"choices": [{"logprobs": None}]}, [1]])
def test_a_server_without_log_probabilities_is_asked_once(tmp_path: Path, answer: Any) -> None:
    script = Script([])
    script.completion = lambda request: answer  # type: ignore[method-assign]
    differences = to_ask("baseline", VARIANTS, [*outputs("baseline"), *outputs("dflash", 3)], {})
    with server(script) as url:
        assert ask_margins(Endpoint(url, "m"), differences, tmp_path) == 0
    assert len(script.requests) == 1
    assert not (tmp_path / MARGINS_FILE).exists()


def test_the_report_audits_each_against_its_own_plain_server(tmp_path: Path) -> None:
    run = BenchRun.read(make_run(tmp_path))
    outcomes = {v.name: Outcome(status="measured") for v in VARIANTS}
    run.model_copy(update={"variants": VARIANTS, "outcomes": outcomes}).write(tmp_path)
    (tmp_path / "requests.jsonl").unlink()
    differing = {"baseline": 0, "dflash": 2, "fp8": 20, "dflash+fp8": 20}
    with RecordWriter(tmp_path) as writer:
        for name, count in differing.items():
            for record in outputs(name, count):
                writer.append(record.model_copy(update={"task": "gsm8k"}))
    with server(Telling([])) as url:
        ask_margins(Endpoint(url, "m"), to_ask("baseline", VARIANTS, read_records(tmp_path), {}), tmp_path)
    report = build(tmp_path)
    audits = {a.variant: (a.reference, a.verdict, a.margins[-1:]) for a in report.losslessness}
    assert audits == {
        "dflash": ("baseline", "near ties", (0.25,)),
        "fp8": ("baseline", "other weights", (0.25,)),
        "dflash+fp8": ("fp8", "identical", ()),
    }
    alone = BenchRun.read(tmp_path)
    alone.model_copy(update={"variants": (VARIANTS[0], VARIANTS[3])}).write(tmp_path)
    report = build(tmp_path)
    assert report.losslessness == ()
    assert any("dflash+fp8 has no losslessness audit" in note for note in report.notes)
    assert json.loads((tmp_path / MARGINS_FILE).read_text())["margins"]

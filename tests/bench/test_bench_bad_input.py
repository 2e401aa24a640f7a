"""Servers that misbehave are counted and shown, whatever they do, and never averaged; the rest of the run goes on."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_server import Script, chunk, server, usage
from test_bench_variants import VERIFIER, options

from bench.records import read_records
from bench.render import to_markdown
from bench.report import build
from bench.run import run_bench
from speculators.schema import write_json

PROMPTS = 4
WHOLE = [chunk("yes", [1]), chunk(".", [2], "stop"), usage(2), "[DONE]"]


class BadServer(Script):
    """Answers the first two measured prompts well (and every warm-up), the others as it is told."""

    def __init__(self, events: list[Any], drop: bool = False, status: int = 200, message: str = "") -> None:
        self.bad, self.bad_drop, self.bad_status = [(0.0, event) for event in events], drop, status
        super().__init__([(0.0, event) for event in WHOLE])
        self.message = message

    @property
    def _is_bad(self) -> bool:
        measured = [r for r in self.requests if "bicycle" not in r["messages"][-1]["content"]]
        return len(measured) > 2 and self.requests[-1] is measured[-1]

    def __getattribute__(self, name: str) -> Any:
        if name in ("events", "drop", "status") and self._is_bad:
            return {"events": self.bad, "drop": self.bad_drop, "status": self.bad_status}[name]
        return super().__getattribute__(name)


def run(tmp_path: Path, bad: Script) -> Path:
    write_json(tmp_path / "verifier" / "config.json", VERIFIER)
    with server(Script([(0.0, event) for event in WHOLE])) as good_url, server(bad) as url:
        compare = (f"baseline={good_url}", f"mine={url}")
        given = options(
            tmp_path, compare=compare, verifier=str(tmp_path / "verifier"), num_prompts=PROMPTS, closing_baseline=False
        )
        run_bench(given, Console(quiet=True))
    return given.output


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (BadServer([*WHOLE[:2], "[DONE]"]), "no usage"),
        (
            BadServer([chunk(""), chunk(None), chunk("", []), usage(0), "[DONE]"]),
            "ended before the answer was finished",
        ),
        (BadServer([chunk("yes", [1])], drop=True), "ClientPayloadError"),
        (BadServer([], status=429, message="slow down"), "status 429: slow down"),
        (BadServer([], status=500, message="boom"), "status 500: boom"),
        (BadServer(["{broken"]), "no chunk"),
    ],
)
def test_failed_requests_are_counted_shown_and_left_out(tmp_path: Path, bad: BadServer, said: str) -> None:
    directory = run(tmp_path, bad)
    report = build(directory)
    cell = report.cell("builtin_code", "mine")
    assert cell is not None
    assert (cell.metrics.num_requests, cell.metrics.num_failed) == (PROMPTS, 2)
    assert cell.metrics.output_tokens == 2 * 2
    (failure,) = report.failures
    assert said in failure
    assert report.failures[failure] == 2
    assert report.outcomes["mine"].status == "measured"
    assert failure in to_markdown(report)


def test_a_prompt_longer_than_the_context_is_listed_and_no_failure(tmp_path: Path) -> None:
    message = "This model's maximum context length is 64 tokens."
    report = build(run(tmp_path, BadServer([], status=400, message=message)))
    cell = report.cell("builtin_code", "mine")
    assert cell is not None
    assert (cell.metrics.num_failed, cell.metrics.num_skipped) == (0, 2)
    assert report.failures == {}
    (note,) = [note for note in report.notes if note.startswith("Skipped")]
    assert note.count("builtin_code") == 2
    assert note in to_markdown(report)


def test_a_file_of_records_cut_in_the_middle_of_a_line_loses_that_line_only(tmp_path: Path) -> None:
    directory = run(tmp_path, Script([(0.0, event) for event in WHOLE]))
    rows = directory / "requests.jsonl"
    whole, before = rows.read_bytes(), read_records(directory)
    rows.write_bytes(whole[:-40])
    cell = build(directory).cell("builtin_code", "baseline")
    assert cell is not None
    assert read_records(directory) == before[:-1]
    assert cell.metrics.num_requests == PROMPTS


def test_a_variant_whose_server_cannot_answer_at_all_is_reported(tmp_path: Path) -> None:
    dead = Script([], status=500)
    report = build(run(tmp_path, dead))
    assert report.outcomes["mine"].status == "failed"
    assert report.cell("builtin_code", "mine") is None
    assert any("mine failed: mine: the warm-up request failed" in note for note in report.notes)


def test_requests_and_counters_that_differ_are_an_error_that_shows_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.measure._COUNTERS_SETTLE_S", 0.05)
    steps = {"acceptance_histogram": [1, 0, 1], "num_draft_tokens": 4}
    told = usage(4, metrics={"speculative_decoding": steps})

    class Other(Script):
        """Its counters tell of one step more a request than the requests do: somebody else is served too."""

        @property
        def metrics(self) -> str:  # type: ignore[override]
            n = len(self.requests)
            return (
                f"vllm:spec_decode_num_drafts_total {3 * n}.0\nvllm:spec_decode_num_draft_tokens_total {6 * n}.0\n"
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {n}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {n}.0\n'
            )

        @metrics.setter
        def metrics(self, _: str) -> None:
            pass

    events = [chunk("yes", [1, 2, 3]), chunk(".", [4], "stop"), told, "[DONE]"]
    report = build(run(tmp_path, Other([(0.0, event) for event in events])))
    cell = report.cell("builtin_code", "mine")
    assert cell is not None
    assert (cell.metrics.num_failed, cell.metrics.acceptance) == (PROMPTS, None)
    (note,) = [note for note in report.notes if "mine, builtin_code is refused" in note]
    assert "8 of 16 drafted tokens accepted in 8 steps" in note
    assert "8 of 24 drafted tokens accepted in 12 steps" in note

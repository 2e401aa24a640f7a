"""Other tools' files in our table. The files in `imported/` are what guidellm 0.8.1 and AIPerf 0.13.0 wrote about
`scripted_server.py`: six requests, two at a time, the last one answered with 500; three chunks of 1, 2 and 3 tokens
some 30 ms apart. They are trimmed to what is read, and to what a reader must not take for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.imports import is_foreign, read_foreign
from bench.records import RequestRecord
from bench.report import build
from speculators.errors import UserError

HERE = Path(__file__).parent / "imported"
GUIDELLM, AIPERF = HERE / "guidellm.json", HERE / "aiperf" / "profile_export.jsonl"


def written(path: Path, **changes: Any) -> str:
    path.write_text(json.dumps({**json.loads(GUIDELLM.read_text()), **changes}))
    return str(path)


def check_scripted(records: list[RequestRecord]) -> None:
    """The time per token is over five tokens, not over two gaps."""
    good = [record for record in records if record.ok]
    assert (len(records), len(good)) == (6, 5)
    for record in good:
        assert record.ttft_s is not None
        assert record.tpot_s is not None
        assert record.e2e_s is not None
        assert 0.02 <= record.ttft_s < record.e2e_s
        assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 5, abs=1e-3)
        assert record.output_tokens == 6
    (bad,) = [record for record in records if not record.ok]
    assert bad.ttft_s is bad.tpot_s is bad.e2e_s is None
    assert sorted(record.started_s for record in records)[0] == 0
    assert len({record.key for record in records}) == 6


def test_guidellm_requests_are_ours_with_prompts_of_their_own() -> None:
    run, records = read_foreign(f"plain={GUIDELLM}")
    check_scripted(records)
    assert "500" in next(record.error for record in records if record.error)
    assert (run.variants[0].name, run.variants[0].verifier) == ("plain", "m")
    assert [(p.point, p.num_requests, p.num_failed) for p in run.points] == [("c2", 6, 1)]
    assert run.points[0].wall_s == pytest.approx(0.3, abs=0.1)
    assert "guidellm 0.8.1" in run.conditions.vllm


def test_aiperf_requests_are_ours_with_their_chunk_gaps() -> None:
    run, records = read_foreign(f"plain={AIPERF}")
    check_scripted(records)
    assert "out of memory" in next(record.error for record in records if record.error)
    assert all(len(record.chunk_gaps_s) == 2 for record in records if record.ok)
    assert all(record.prompt_tokens == 8 for record in records)
    assert [(p.point, p.num_requests, p.num_failed) for p in run.points] == [("c2", 6, 1)]
    assert run.variants[0].verifier == "m"
    assert "AIPerf 0.13.0" in run.conditions.vllm


def test_two_files_of_a_tool_are_compared_prompt_by_prompt(tmp_path: Path) -> None:
    data = json.loads(GUIDELLM.read_text())
    for row in data["benchmarks"][0]["requests"]["successful"]:
        row["inter_token_latency_ms"] /= 2
    fast = written(tmp_path / "fast.json", benchmarks=data["benchmarks"])
    report = build(f"baseline={GUIDELLM}", f"draft={fast}")
    cell = report.cell("imported", "draft")
    assert cell is not None
    assert cell.speed_up is not None
    assert (cell.speed_up.num_prompts, cell.speed_up.estimate) == (5, pytest.approx(2))
    assert cell.metrics.num_failed == 1
    assert sum("500" in failure for failure in report.failures) == 2


def test_files_of_other_prompts_are_not_compared(tmp_path: Path) -> None:
    other = json.loads(GUIDELLM.read_text())["config"]
    other["spec"]["data"][0]["prompt_tokens"] = 99
    with pytest.raises(UserError, match=r"unequal conditions \(prompts"):
        build(f"baseline={GUIDELLM}", f"draft={written(tmp_path / 'b.json', config=other)}")
    with pytest.raises(UserError, match="unequal conditions"):
        build(f"baseline={GUIDELLM}", f"draft={AIPERF}")


def test_every_benchmark_of_a_guidellm_file_is_a_load(tmp_path: Path) -> None:
    (first,) = json.loads(GUIDELLM.read_text())["benchmarks"]
    second = json.loads(json.dumps(first))
    second["config"]["strategy"] = {"type_": "poisson", "rate": 2.5, "max_concurrency": 512}
    run, records = read_foreign(written(tmp_path / "two.json", benchmarks=[first, second]))
    assert run.conditions.points == ("c2", "r2.5")
    assert [sum(record.point == point for record in records) for point in ("c2", "r2.5")] == [6, 6]


def test_without_its_summary_aiperfs_load_is_what_was_in_flight(tmp_path: Path) -> None:
    alone = tmp_path / "p.jsonl"
    warm = json.loads(AIPERF.read_text().splitlines()[0])
    warm["metadata"] |= {"benchmark_phase": "warmup", "session_num": 99}
    alone.write_text(AIPERF.read_text() + json.dumps(warm) + '\n{"metadata": {"cut off')
    run, records = read_foreign(str(alone))
    check_scripted(records)
    assert (run.variants[0].name, run.variants[0].verifier, run.conditions.points) == ("p", "unknown", ("c2",))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "{}", "save-detailed"),
        ("a.json", '{"benchmarks": []}', "guidellm"),
        ("a.json", '{"benchmarks": [{"config": {}}]}', "guidellm"),
        ("a.json", '{"benchmarks": 7}', "guidellm"),
        ("a.json", "[", "a.json"),
        ("a.jsonl", "", "no measured request"),
        ("a.jsonl", '{"prompt": "x"}\n', "line 1 has no metadata"),
        ("a.jsonl", '{broken\n{"metadata": {}, "metrics": {}}\n', "line 1 is not JSON"),
        ("a.jsonl", '{"metadata": {}, "metrics": {}}\n', "cannot be read as a profile_export.jsonl"),
        ("missing.jsonl", None, "cannot be read"),
    ],
)
def test_a_file_of_no_tool_is_refused_in_a_sentence(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert is_foreign(str(path))
    with pytest.raises(UserError, match=said):
        read_foreign(str(path))

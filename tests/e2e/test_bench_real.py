"""A whole bench on real vLLM: untrained drafts of a real verifier are measured, lossless, and hardly ever accepted."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.records import BenchRun, read_records
from bench.render import write_report
from bench.report import build
from bench.run import run_bench
from bench.suite import BenchOptions
from serve.quantize import fp8_unsupported_reason
from speculators import checkpoint
from speculators.algorithms import ALGORITHMS
from speculators.verifier import Verifier

DRAFT_VOCAB = 4096
OWN: dict[str, dict[str, Any]] = {"eagle3": {"ttt_steps": 3}, "dflash": {"block_size": 8, "mask_token_id": 5}}


def write_untrained(run: Path, algorithm: str, verifier: Verifier) -> None:
    """A run directory with one checkpoint of random weights; its draft vocabulary is the verifier's first tokens."""
    import torch

    config_class = ALGORITHMS[algorithm].config
    fields = {**config_class.shape_of(verifier, DRAFT_VOCAB), "num_layers": 1, **OWN[algorithm]}
    config = config_class.model_validate({**fields, "aux_layer_ids": verifier.default_aux_layer_ids()})
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        if name == "d2t":
            tensors[name] = torch.zeros(shape, dtype=torch.int64)
        elif name == "t2d":
            tensors[name] = torch.arange(shape[0]) < DRAFT_VOCAB
        else:
            tensors[name] = torch.ones(shape) if "norm" in name else 0.02 * torch.randn(shape, generator=generator)
    checkpoint.write(run / checkpoint.CHECKPOINTS / "step-1", config.to_json(), tensors)


@pytest.mark.e2e
def test_a_bench_on_real_servers_from_start_to_report(tmp_path: Path, verifier_dir: Path) -> None:
    verifier = Verifier.read(verifier_dir)
    for algorithm in OWN:
        write_untrained(tmp_path / "out" / algorithm, algorithm, verifier)
    options = BenchOptions(
        compare=("eagle3", "dflash@4", "dflash+fp8"),
        tasks=("builtin_code", "builtin_reasoning"),
        runs_dir=tmp_path / "out",
        output=tmp_path / "bench",
        num_prompts=3,
        max_tokens=24,
        enforce_eager=True,
    )
    run = run_bench(options, Console(stderr=True))
    assert run is not None
    records = read_records(options.output)
    assert all(record.ok for record in records)
    fp8_runs = fp8_unsupported_reason() is None
    closing = [record for record in records if record.pass_index]
    assert len(records) - len(closing) == 6 * (4 if fp8_runs else 3)
    assert closing
    assert {record.variant for record in closing} == {"baseline"}
    assert run.outcomes["dflash+fp8"].status == ("measured" if fp8_runs else "skipped")

    for record in records:
        assert record.tpot_s is not None
        assert record.ttft_s is not None
        assert record.token_ids is not None
        assert len(record.token_ids) == record.output_tokens == sum(record.chunk_tokens)
        assert (record.acceptance is None) == (record.variant == "baseline")
        if record.acceptance:
            assert record.acceptance.steps == len(record.accepted_per_step)
    assert all(point.agrees is not False for point in run.points)
    assert {p.variant for p in run.points if p.agrees} >= {"eagle3", "dflash@4"}

    report = build(options.output)
    lengths = {c.variant: c.acceptance_length.estimate for c in report.cells if c.acceptance_length}
    assert all(1 <= length < 1.2 for length in lengths.values())
    audits = {audit.variant: audit for audit in report.losslessness}
    assert audits["eagle3"].equal >= audits["eagle3"].compared - 1, "greedy outputs part only where tokens are tied"
    assert json.loads((write_report(report, options.output).parent / "report.json").read_text())["schema_version"] == 2

    servers = sorted((options.output / "logs").iterdir())
    stamps = [log.stat().st_mtime_ns for log in servers]
    assert run_bench(options, Console(stderr=True)) is not None, "a finished run is left as it is"
    assert [log.stat().st_mtime_ns for log in servers] == stamps
    assert BenchRun.read(options.output).points == run.points

"""Tokens/s and peak memory of training, ours against upstream's 0.9.0, in alternating fresh processes.

    python benchmarks/train_throughput.py --data output/data --hidden-states output/hidden_states \
        --verifier output/verifier

Equal on both sides: verifier, rows and their order, layers, unrolled steps, block, anchors, draft vocabulary, the loss
(KL to the verifier), Muon with AdamW for the rest, float32 weights, bf16 products. Tokens are real ones, never padding.
Memory is the largest resident size between the first and the last step, less the resident size with model and verifier
ends loaded: gradients, optimizer state, activations, rows. `upstream_driver.py` says what upstream needs on a CPU.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from drivers import deliver, export_rows, run_ours, run_script, run_upstream
from pydantic import Field
from throughput_result import Conditions, Point, Run, Side, ThroughputResult, summarise, table
from training_job import Algorithm, Exported, Job, Measured, make_job
from upstream_environment import upstream_python

from speculators.cli.options import schema_command
from speculators.errors import UserError
from speculators.provenance import Provenance, processor_flags
from speculators.schema import Strict
from speculators.verifier import Verifier

Growth = Literal["length", "anchors", "vocabulary"]

_OPTIMIZER = {"ours": {"optimizer": "muon"}, "upstream": {"optimizer": "muon"}}
# Upstream's defaults that would make another network or another loss than ours.
_SAME_WORK: dict[Algorithm, dict[str, Any]] = {
    "eagle3": {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False, "loss_fn": "kl_div"},
    "dflash": {"loss_fn": "kl_div", "per_position_loss_weight": "fixed-exp-decay"},
}
_FLAGS = ("amx_tile", "amx_bf16", "avx512_bf16", "avx512f")
_LENGTHS = (512, 1024, 2048, 4096, 8192)
_ANCHORS = (64, 128, 256, 512)
_VOCABULARIES = (8192, 16384, 32768, 65536, 131072)


class ThroughputOptions(Strict):
    """Measure training against upstream speculators 0.9.0 on the same rows, in alternating runs."""

    data: Path = Field(description="Data directory made by `speculators prepare`.")
    hidden_states: Path = Field(description="Cache made by `speculators extract`.")
    verifier: str = Field(description="Directory of the verifier.")
    upstream_python: Path | None = Field(
        None, description="Interpreter with upstream 0.9.0 (default: an environment is made in the user's cache)."
    )
    algorithms: tuple[Algorithm, ...] = Field(("eagle3", "dflash"), description="Algorithms to measure.")
    repeats: int = Field(3, ge=1, description="Runs of each side; those of --grow are one each.")
    steps: int = Field(15, ge=2, description="Steps of a run.")
    warmup: int = Field(3, ge=1, description="First steps of a run that do not count.")
    row_length: int = Field(1024, ge=16, description="Tokens of a packed row.")
    max_anchors: int = Field(128, ge=1, description="dflash: blocks of a row.")
    draft_vocab_size: int = Field(8192, ge=1, description="Tokens the draft can propose.")
    grow: tuple[Growth, ...] = Field((), description="Also grow: length, anchors (dflash), vocabulary.")
    threads: int | None = Field(None, ge=1, description="OMP_NUM_THREADS of the runs (default: as it is).")
    output: Path | None = Field(None, description="Also write the result here as JSON.")
    json_output: bool = Field(False, description="Print the result as JSON.", json_schema_extra={"flags": ["--json"]})


def points(options: ThroughputOptions, full_vocabulary: int) -> Iterator[Point]:
    """The base point of each algorithm, followed by its grown ones. Sizes beyond the verifier's are left out."""
    vocabularies = (*(size for size in _VOCABULARIES if size < full_vocabulary), full_vocabulary)
    grown: dict[Growth, tuple[str, tuple[int, ...]]] = {
        "length": ("row_length", _LENGTHS),
        "anchors": ("max_anchors", _ANCHORS),
        "vocabulary": ("draft_vocab_size", vocabularies),
    }
    for algorithm in options.algorithms:
        base = Point(
            algorithm=algorithm,
            row_length=options.row_length,
            max_anchors=options.max_anchors,
            draft_vocab_size=options.draft_vocab_size,
        )
        yield base
        for growth in options.grow:
            field, sizes = grown[growth]
            if (growth, algorithm) != ("anchors", "eagle3"):
                yield from (base.model_copy(update={field: s}) for s in sizes if s != getattr(base, field))


def measure(options: ThroughputOptions) -> ThroughputResult:
    """Run everything, ours and upstream's in turn.

    Raises:
        UserError: a run at a base point failed; at a grown point (memory ran out, say) the failure is noted instead.
    """
    if options.warmup >= options.steps:
        raise UserError(f"--warmup: {options.warmup} of {options.steps} steps leaves none to count; give more --steps.")
    python = upstream_python(options.upstream_python)
    load = os.getloadavg()
    runs: list[Run] = []
    rows_full: dict[str, float] = {}
    packages: dict[str, str] = {}
    based: set[Algorithm] = set()
    for point in points(options, Verifier.read(options.verifier).vocab_size):
        is_base = point.algorithm not in based
        based.add(point.algorithm)
        with tempfile.TemporaryDirectory(prefix="throughput-") as directory:
            sizes = {name: getattr(point, name) for name in ("row_length", "max_anchors", "draft_vocab_size")}
            job = make_job(point.algorithm, options, Path(directory), steps=options.steps, **sizes)
            export_rows(job, options.threads)
            exported = Exported.model_validate_json((Path(job.rows) / "exported.json").read_text(encoding="utf-8"))
            rows_full[str(point.row_length)] = exported.fullness
            for _ in range(options.repeats if is_base else 1):
                for side in ("ours", "upstream"):
                    try:
                        measured = _run(side, python, job, options.threads)
                    except UserError as error:
                        if is_base:
                            raise
                        runs.append(Run(point=point, side=side, failed=str(error)))
                        print(f"{point.algorithm} {side}: {error}", file=sys.stderr)
                        continue
                    runs.append(_as_run(point, side, measured, options.warmup))
                    packages = measured.packages if side == "upstream" else packages
    conditions = Conditions(
        provenance=Provenance.collect(),
        upstream_packages=packages,
        processor_flags=tuple(flag for flag in _FLAGS if flag in processor_flags()),
        threads=str(options.threads or os.environ.get("OMP_NUM_THREADS", "all cores")),
        load_average=load,
        rows_full=rows_full,
        steps=options.steps,
        warmup=options.warmup,
    )
    return ThroughputResult(conditions=conditions, runs=tuple(runs))


def _run(side: Side, python: Path, job: Job, threads: int | None) -> Measured:
    if side == "ours":
        return run_ours(job.model_copy(update={"overrides": _OPTIMIZER[side]}), threads)
    overrides = {**_OPTIMIZER[side], **_SAME_WORK[job.algorithm]}
    return run_upstream(python, job.model_copy(update={"overrides": overrides}), threads)


def _as_run(point: Point, side: Side, measured: Measured, warmup: int) -> Run:
    run = Run(
        point=point,
        side=side,
        tokens_per_s=measured.tokens_per_s(warmup),
        peak_over_resident_bytes=measured.peak_over_resident_bytes,
        resident_bytes=measured.resident_bytes,
    )
    print(
        f"{point.algorithm} {side}: {run.tokens_per_s:,.0f} tokens/s, "
        f"{measured.peak_over_resident_bytes / 2**20:,.0f} MiB over {measured.resident_bytes / 2**20:,.0f} MiB",
        file=sys.stderr,
    )
    return run


def run(options: ThroughputOptions) -> None:
    """Measure, write, show."""
    result = measure(options)
    console = deliver(result, options.output, options.json_output)
    if console is None:
        return
    console.print(table(summarise(result.runs)))
    conditions, p = result.conditions, result.conditions.provenance
    flags = " ".join(conditions.processor_flags) or "none of " + " ".join(_FLAGS)
    full = ", ".join(f"{share:.1%} at {length}" for length, share in conditions.rows_full.items())
    console.print(f"{p.processor}, {p.cores} cores, {flags}; threads: {conditions.threads}; Python {p.python}")
    console.print(f"ours: {p.speculators} on {p.packages}; upstream: {conditions.upstream_packages}")
    console.print(f"{options.steps} steps, {options.warmup} not counted; load {conditions.load_average}; full: {full}")


if __name__ == "__main__":
    run_script("train_throughput.py", schema_command(ThroughputOptions, run))

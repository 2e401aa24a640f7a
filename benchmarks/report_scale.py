"""Render a report of 100,000 request records and print seconds and peak memory: `python benchmarks/report_scale.py`.

The limit is on seconds of CPU (one thread), so that other work on the machine does not count.

Five variants, five tasks, two loads; 64 output tokens a request with token ids, chunk gaps and steps in order. The run
is made up and written first; reading, computing and rendering are measured in a process of their own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S, LIMIT_BYTES = 10.0, 2**30
TASKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt_bench")
POINTS = ("c1", "c16")
VARIANTS = ("baseline", "eagle3", "dflash", "dflash@4", "ngram")
_TOKENS = 64

_MEASURED = """
import resource, sys, time
start = time.perf_counter()
from pathlib import Path
from bench.render import write_report
from bench.report import build
write_report(build(sys.argv[1]), Path(sys.argv[1]))
print(time.perf_counter() - start, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def write_run(directory: Path, num_records: int) -> None:
    """Make up a run of `num_records` requests."""
    import numpy as np

    from bench.conditions import Conditions, Outcome, TaskInfo, Variant
    from bench.records import REQUESTS_FILE, BenchRun
    from speculators.provenance import Provenance

    prompts = num_records // (len(TASKS) * len(POINTS) * len(VARIANTS))
    conditions = Conditions(
        verifier="/models/made-up",
        verifier_revision="0",
        template_hash="0",
        prompts=dict.fromkeys(TASKS, "0"),
        max_tokens=_TOKENS,
        temperature=0.0,
        seed=0,
        points=POINTS,
        repeats=1,
        enforce_eager=False,
        server_args=(),
        vllm="0",
        machine="made up",
    )
    BenchRun(
        conditions=conditions,
        tasks=tuple(TaskInfo(name=task, group="made up", num_prompts=prompts) for task in TASKS),
        variants=tuple(
            Variant(name=name, verifier="/models/made-up", algorithm=name.split("@")[0] if name != "baseline" else None)
            for name in VARIANTS
        ),
        outcomes={name: Outcome(status="measured") for name in VARIANTS},
        provenance=Provenance.collect(),
    ).write(directory)
    rng = np.random.default_rng(0)
    with (directory / REQUESTS_FILE).open("w", encoding="utf-8") as file:
        for variant in VARIANTS:
            for point in POINTS:
                for task in TASKS:
                    for prompt in range(prompts):
                        file.write(json.dumps(_row(rng, variant, point, task, prompt)) + "\n")


def _row(rng, variant, point, task, prompt):  # type: ignore[no-untyped-def]
    drafts = variant != "baseline"
    accepted = rng.integers(0, 4, _TOKENS // 2).tolist() if drafts else [0] * (_TOKENS - 1)
    gaps = (0.03 * rng.lognormal(0, 0.2, len(accepted))).round(6).tolist()
    row = {"variant": variant, "task": task, "prompt_id": f"{prompt:05d}", "point": point, "started_s": prompt * 0.5}
    row |= {"ttft_s": 0.05, "tpot_s": sum(gaps) / (_TOKENS - 1), "e2e_s": 0.05 + sum(gaps), "chunk_gaps_s": gaps}
    row |= {"chunk_tokens": [1, *(a + 1 for a in accepted)], "prompt_tokens": 100, "output_tokens": _TOKENS}
    row |= {"finish_reason": "length", "text": "some words of an answer " * 10}
    row |= {"token_ids": rng.integers(0, 49152, _TOKENS).tolist(), "prompt_token_ids": list(range(100))}
    if drafts:
        histogram = [accepted.count(a) for a in range(4)]
        row |= {"acceptance": {"histogram": histogram, "drafted": 3 * len(accepted)}, "accepted_per_step": accepted}
        row |= {"drafted_per_step": [3] * len(accepted)}
    return row


def main() -> int:
    """Measure, and return 1 beyond the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="Where the run is left; by default it is deleted.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        write_run(directory, options.records)
        size = (directory / "requests.jsonl").stat().st_size
        print(f"{options.records} records, {size / 2**20:.0f} MiB, written in {time.perf_counter() - started:.1f} s")
        told = subprocess.run([sys.executable, "-c", _MEASURED, str(directory)], check=True, capture_output=True)
    wall, seconds, peak = map(float, told.stdout.split())
    print(f"report: {wall:.1f} s, {seconds:.1f} s of CPU (limit {LIMIT_S:.0f}), ", end="")
    print(f"{peak / 2**20:.0f} MiB (limit {LIMIT_BYTES / 2**20:.0f})")
    return int(seconds > LIMIT_S or peak > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())

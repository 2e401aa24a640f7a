"""The benchmark of thread bindings runs through, with a stand-in for vLLM, and its ratios are within a round."""

import json
import os
import subprocess
import sys
from pathlib import Path

from fake_vllm import environment
from tiny_models import write_tiny_verifier

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_cpu_binding.py"


def test_every_binding_is_measured_with_one_stream_and_eight(tmp_path):
    environment(tmp_path / "vllm")
    write_tiny_verifier(tmp_path / "verifier", num_layers=1)
    command = [sys.executable, SCRIPT, tmp_path / "verifier", "--output", tmp_path / "out", "--rounds", "1"]
    command += ["--tokens", "4", "--no-compiled", "--vllm", tmp_path / "vllm"]
    root = str(SCRIPT.parents[1])
    given = {**os.environ, "FAKE_VLLM": "complete", "FAKE_PIDS": str(tmp_path / "pids"), "PYTHONPATH": root}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out" / "binding.json").read_text())["runs"]
    cores = sorted(os.sched_getaffinity(0))
    bindings = list(dict.fromkeys(["auto", str(cores[0]), ",".join(map(str, cores)), "nobind"]))
    assert [(run["binding"], run["streams"]) for run in runs] == [(b, n) for b in bindings for n in (1, 8)]
    rows = (tmp_path / "out" / "binding.md").read_text().splitlines()[2:]
    assert len(rows) == len(runs)
    assert all("| 1.00 (1.00 to 1.00) |" in row for row in rows if row.startswith("| `auto`"))

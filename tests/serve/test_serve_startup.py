"""The benchmark of our share of a start runs through, and what it measures is a start of the stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_models import write_random_draft, write_tiny_verifier

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_startup.py"


def test_direct_starts_ours_and_dry_runs_alternate_and_the_difference_is_told(tmp_path):
    verifier = write_tiny_verifier(tmp_path / "verifier")
    draft = write_random_draft(tmp_path / "draft", "eagle3", verifier)
    command = [sys.executable, SCRIPT, verifier, draft, "--rounds", "2", "--output", tmp_path / "startup.json"]
    given = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "startup.json").read_text())["runs"]
    kinds = ["direct", "serve", "dry-run"]
    assert [(run["model"], run["kind"]) for run in runs if run["round"] == 1] == [
        (str(model), kind) for model in (verifier, draft) for kind in kinds
    ]
    assert [run["kind"] for run in runs if run["round"] == 0][:3] == kinds[::-1]
    assert all(run["cpu_s"] > 0 and run["wall_s"] > 0 for run in runs)
    assert done.stdout.count("added by serve") == 2

"""The whole pipeline on the real verifier with real vLLM: overfit one conversation, and serving must accept all of it.

If training and serving differ in anything (alignment, rotary positions, norms, vocabulary maps), it shows here.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from speculators.acceptance import Acceptance

pytestmark = pytest.mark.e2e

PROMPT = "Explain in a few sentences why the sky is blue, and then write a short Python function that adds two numbers."
STEPS = {"eagle3": ["--max-steps", "120", "--lr", "1e-3"], "dflash": ["--max-steps", "150"]}


def speculators(*arguments: object) -> str:
    """Run a command as a user would; returns its standard output."""
    command = [sys.executable, "-m", "speculators", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def work(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One conversation, answered by the verifier, its hidden states through vLLM, and both drafts overfit on it."""
    path = tmp_path_factory.mktemp("pipeline")
    (path / "prompts.jsonl").write_text(json.dumps({"id": "sky", "source": "chat", "prompt": PROMPT}) + "\n")
    speculators(
        "regenerate", "--verifier", verifier_dir, "--prompts", path / "prompts.jsonl",
        "--output", path / "answers.jsonl", "--max-tokens", 128, "--enforce-eager",
    )  # fmt: skip
    speculators("prepare", "--verifier", verifier_dir, "--data", path / "answers.jsonl", "--output", path / "data")
    speculators(
        "extract", "--verifier", verifier_dir, "--data", path / "data", "--output", path / "hidden_states",
    )  # fmt: skip
    for algorithm, steps in STEPS.items():
        speculators(
            "train", "--verifier", verifier_dir, "--data", path / "data", "--hidden-states", path / "hidden_states",
            "--speculator-type", algorithm, "--output", path / algorithm, "--epochs", 1000, "--validate-every", 0,
            "--save-every", 0, *steps,
        )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def report(work: Path, verifier_dir: Path) -> dict:
    """The bench's report over the very prompt that the drafts know by heart."""
    speculators(
        "bench", "--verifier", verifier_dir, "--runs-dir", work, "--compare", "eagle3,dflash",
        "--tasks", work / "prompts.jsonl", "--max-tokens", 128, "--output", work / "bench", "--enforce-eager",
    )  # fmt: skip
    return json.loads((work / "bench" / "report.json").read_text())


@pytest.mark.parametrize("algorithm", STEPS)
def test_an_overfit_draft_is_accepted_whole_when_served(work, report, algorithm):
    rows = [json.loads(line) for line in (work / "bench" / "requests.jsonl").read_text().splitlines()]
    accepted = [
        Acceptance(**row["acceptance"]) for row in rows if row["variant"] == algorithm and row.get("acceptance")
    ]
    assert accepted, "the server's own acceptance numbers are in the records"
    total = sum(accepted[1:], start=accepted[0])
    assert total.length >= total.num_speculative_tokens + 1 - 0.2


@pytest.mark.parametrize("algorithm", STEPS)
def test_replay_predicts_what_the_server_accepted(work, verifier_dir, report, algorithm):
    predicted = json.loads(
        speculators(
            "replay", work / algorithm, "--verifier", verifier_dir, "--answers", work / "answers.jsonl", "--json"
        )
    )
    rows = [json.loads(line) for line in (work / "bench" / "requests.jsonl").read_text().splitlines()]
    served = [Acceptance(**row["acceptance"]) for row in rows if row["variant"] == algorithm and row.get("acceptance")]
    total = sum(served[1:], start=served[0])
    assert Acceptance(**predicted["total"]).length == pytest.approx(total.length, rel=0.1)


def test_the_report_is_whole_and_opens_without_network(work, report):
    html = (work / "bench" / "report.html").read_text()
    assert "http://" not in html.split("<body")[0].replace("http://www.w3.org", "")
    assert "eagle3" in html
    assert "dflash" in html
    assert (work / "bench" / "report.md").read_text().count("dflash") >= 1

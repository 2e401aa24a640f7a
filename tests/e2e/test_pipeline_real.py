"""The whole pipeline on the real verifier with real vLLM: overfit one conversation, and serving must accept all of it.

If training and serving differ in anything (alignment, rotary positions, norms, vocabulary maps), it shows here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speculators.acceptance import Acceptance

pytestmark = pytest.mark.e2e

PROMPT = "Explain in a few sentences why the sky is blue, and then write a short Python function that adds two numbers."
# Hard labels: the text itself is to be known by heart, also where the verifier hesitated between two tokens.
STEPS = {name: ["--max-steps", "100", "--loss-fn", "ce"] for name in ("eagle3", "dflash")}


def speculators(*arguments: object) -> str:
    """Run a command as a user would; returns its standard output."""
    command = [sys.executable, "-m", "speculators", *map(str, arguments)]
    # One thread for training: two that wait for each other are slow on a machine that does anything else.
    threads = {"OMP_NUM_THREADS": "1"} if arguments[0] in ("train", "replay") else {}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **threads})
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


def served(work: Path, algorithm: str) -> Acceptance:
    """The server's accepted tokens, step by step, for as long as its answer is the text that the draft knows.

    Verifying several tokens at once may flip a near-tie of the verifier's; from there on the answer is another text.
    """
    rows = [json.loads(line) for line in (work / "bench" / "requests.jsonl").read_text().splitlines()]
    known = next(row["token_ids"] for row in rows if row["variant"] == "baseline")
    row = next(row for row in rows if row["variant"] == algorithm)
    same = next((i for i, (a, b) in enumerate(zip(known, row["token_ids"], strict=False)) if a != b), len(known))
    histogram, emitted = [0] * len(row["acceptance"]["histogram"]), 1
    for accepted in row["accepted_per_step"]:
        emitted += accepted + 1
        # The last step is cut short by the end of the text, or by the token that differs.
        if emitted > same - len(histogram):
            break
        histogram[accepted] += 1
    return Acceptance.from_histogram(histogram)


@pytest.mark.parametrize("algorithm", STEPS)
def test_an_overfit_draft_is_accepted_whole_when_served(work, report, algorithm):
    acceptance = served(work, algorithm)
    assert acceptance.steps >= 5, "too little of the known text was served to tell"
    assert acceptance.length >= acceptance.num_speculative_tokens + 1 - 0.2


@pytest.mark.parametrize("algorithm", STEPS)
def test_replay_predicts_what_the_server_accepted(work, verifier_dir, report, algorithm):
    predicted = json.loads(
        speculators(
            "replay", work / algorithm, "--verifier", verifier_dir, "--answers", work / "answers.jsonl", "--json"
        )
    )
    assert Acceptance(**predicted["total"]).length == pytest.approx(served(work, algorithm).length, rel=0.1)


def test_the_report_is_whole_and_opens_without_network(work, report):
    html = (work / "bench" / "report.html").read_text()
    assert "http://" not in html.split("<body")[0].replace("http://www.w3.org", "")
    assert "eagle3" in html
    assert "dflash" in html
    assert (work / "bench" / "report.md").read_text().count("dflash") >= 1

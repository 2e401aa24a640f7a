"""Two tutorials, run: every command of theirs in its order, as written, on a tiny verifier in an empty directory.

What a tutorial leaves to a large machine is stood in for by options added here (`SMALLER`): answers come from a chat
server of the tests, states from transformers, and what would start vLLM is a dry run.
"""

import importlib
import shlex
import sys
from pathlib import Path

import pytest
from chat_server import ChatServer
from chatml_verifier import tiny_tokenizer, write_jsonl
from click.testing import CliRunner, Result
from test_docs import DOCS, commands

sys.path.append(str(Path(__file__).parent / "serve"))
from fake_vllm import environment
from tiny_models import write_random_draft, write_tiny_verifier

from speculators.cli import COMMANDS

TRAINED = ("eagle3", "dflash")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the tutorials take for granted: a model, a file of traffic, and vLLM."""
    root = tmp_path_factory.mktemp("tutorial")
    write_tiny_verifier(root / "models" / "mine", num_layers=30)  # so that layers 2, 15 and 27 are its default ones
    tiny_tokenizer().save_pretrained(root / "models" / "mine")
    rows = [{"id": f"c{i}", "prompt": f"how are you, {i}?", "source": "chat"} for i in range(260)]
    write_jsonl(root / "traffic.jsonl", rows)
    environment(root / "vllm")
    write_random_draft(root / "downloads" / "some-draft", "eagle3", root / "models" / "mine")
    return root


def smaller(place: Path, url: str) -> dict[str, list[str]]:
    """Options that are added to a command so that it fits here."""
    no_vllm = ["--vllm", str(place / "vllm"), "--dry-run"]
    tiny_run = ["--max-steps", "2", "--row-length", "64", "--device", "cpu"]
    return {
        "regenerate": ["--endpoint", url],
        "prepare": ["--draft-vocab-size", "256"],
        "extract": ["--source", "local"],
        "doctor": ["--draft-vocab-size", "256"],
        "train": tiny_run,
        "serve": no_vllm,
        "bench": no_vllm,
    }


def run(words: list[str], added: list[str]) -> Result:
    name, *arguments = words
    command = importlib.import_module(COMMANDS[name].module).command
    return CliRunner().invoke(command, [*arguments, *added])


def shell_lines(page: str) -> list[list[str]]:
    """`head` and `tail` lines of the page, which cut the traffic in two."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [shlex.split(line) for line in text.splitlines() if line.startswith(("head ", "tail "))]


def test_the_walk_on_your_own_traffic_and_on_from_a_published_draft(place, monkeypatch):
    monkeypatch.chdir(place)
    server = ChatServer()
    added = smaller(place, server.url)
    lines = (place / "traffic.jsonl").read_text().splitlines(keepends=True)
    assert [words[-1] for words in shell_lines("tutorials/own-traffic.md")] == ["held_out.jsonl", "training.jsonl"]
    (place / "held_out.jsonl").write_text("".join(lines[:200]))
    (place / "training.jsonl").write_text("".join(lines[200:]))

    done: list[str] = []
    for page in ("tutorials/own-traffic.md", "tutorials/from-published.md"):
        for words in commands((DOCS / page).read_text(encoding="utf-8")):
            extra = added.get(words[0], [])
            if words[0] == "train" and "--from-pretrained" not in words:
                extra = [*extra, "--draft-vocab-size", "256"]
            result = run(words, [option for option in extra if option != "--dry-run" or option not in words])
            allowed = {0, 1} if words[0] == "doctor" else {0}  # random weights: not this verifier's own text
            assert result.exit_code in allowed, (page, words, result.output, result.exception)
            done.append(words[0])
    server.http.shutdown()

    walked = ["regenerate", "prepare", "extract", "doctor", "train", "train", "train", "replay", "serve", "bench"]
    assert done[: len(walked)] == walked
    assert {"convert", "replay", "extract", "train", "bench", "serve"} <= set(done[len(walked) :])
    assert all((place / "output" / name / "best.json").exists() for name in (*TRAINED, "continued"))

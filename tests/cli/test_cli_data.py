"""`fetch`, `prepare` and `regenerate` as a user calls them: results on stdout, errors in one sentence with exit 2."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from speculators.cli.options import resolve
from speculators.data.prepare import PrepareOptions

sys.path.append(str(Path(__file__).parents[1] / "data"))
from chat_server import ChatServer
from chatml_verifier import chat, write_jsonl, write_verifier

ROWS = [{"id": f"c{i}", "messages": chat(f"hello {i}", f"the answer is {i}")} for i in range(30)]


def speculators(*arguments, **environment):
    command = [sys.executable, "-m", "speculators", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200", **environment})


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return write_verifier(tmp_path_factory.mktemp("verifier"))


def test_prepare_prints_one_json_document_and_saves_the_run_to_repeat(tmp_path, verifier):
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    given = ("--verifier", verifier, "--data", data, "--output", tmp_path / "out", "--draft-vocab-size", 64, "--json")
    first = speculators("prepare", *given)
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    assert summary["rows"] == sum(s["samples"] for s in summary["splits"].values()) == 30
    saved = yaml.safe_load((tmp_path / "out" / "prepare.yaml").read_text())
    assert resolve(PrepareOptions, saved).data == (data,)


def test_an_interrupted_regenerate_keeps_what_it_has_and_continues(tmp_path, verifier):
    server = ChatServer(delay_s=0.3)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"id": i, "prompt": f"question {i}"} for i in range(24)])
    output = tmp_path / "out.jsonl"
    given = ["regenerate", "--verifier", verifier, "--prompts", prompts, "--output", output, "--endpoint", server.url]
    command = [sys.executable, "-m", "speculators", *map(str, given), "--concurrency", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (output.exists() and output.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    done = [json.loads(line)["id"] for line in output.read_text().splitlines()]
    assert 0 < len(done) < 24

    server.delay_s = 0
    summary = json.loads(speculators(*given, "--json").stdout)
    assert (summary["answered_before"], summary["answered"]) == (len(done), 24 - len(done))
    assert sorted(int(json.loads(line)["id"]) for line in output.read_text().splitlines()) == list(range(24))
    server.http.shutdown()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("prepare", "--data", "x.jsonl", "--output", "o"), "--verifier is missing"),
        (("prepare", "--verifier", "/nowhere", "--data", "x.jsonl", "--output", "o"), "/nowhere is not a directory"),
        (
            ("prepare", "--verifier", "{v}", "--data", "absent.jsonl", "--output", "o", "--draft-vocab-size", "64"),
            "absent.jsonl: no such file",
        ),
        (
            ("prepare", "--verifier", "{v}", "--data", "{d}", "--output", "o", "--draft-vocab-size", "64"),
            "no usable conversation",
        ),
        (
            ("prepare", "--verifier", "{v}", "--data", "{d}", "--output", "o", "--draft-vocab-size", "99999"),
            "99999 is not",
        ),
        (("prepare", "--verifier", "{v}", "--data", "{d}", "--output", "o", "--max-length", "0"), "--max-length"),
        (("regenerate", "--verifier", "{v}", "--prompts", "{d}", "--output", "o.jsonl"), "no usable prompt"),
        (("fetch", "model", "--output", "o"), "verifier"),
        (("fetch", "verifier", "--output", "{v}"), "not a complete verifier"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path, verifier, arguments, sentence):
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": "no conversation"}])
    result = speculators(*(argument.format(v=verifier, d=data) for argument in arguments))
    assert result.returncode == 2
    assert result.stdout == ""
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr

"""`serve`, `extract` and `quantize` as a user calls them: what is passed on, and errors in one sentence with exit 2."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from fake_vllm import environment
from tiny_models import write_models, write_random_draft, write_tiny_verifier


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli-serve")
    write_models(root, "dflash")
    environment(root / "vllm")
    return root


def speculators(place, *arguments, **variables):
    command = [sys.executable, "-m", "speculators", *map(str, arguments)]
    given = {**os.environ, "SPECULATORS_VLLM": str(place / "vllm"), "COLUMNS": "200", **variables}
    return subprocess.run(command, capture_output=True, text=True, env=given)


def test_a_dry_run_prints_command_and_environment_with_unknown_options_untouched_and_in_order(place):
    passed_on = [
        "--max-model-len",
        "4096",
        "--foo",
        "bar",
        "-x",
        "1",
        "-O3",
        "--dict",
        '{"a": [1, 2], "b": 3}',
        "--flag",
    ]
    given = ("-tp", "2", *passed_on[:4], "--port", "8231", *passed_on[4:], "--dry-run")
    done = speculators(place, "serve", place / "dflash", *given)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.replace("\\\n", " "))
    assert words[-len(passed_on) :] == passed_on
    assert "VLLM_NO_USAGE_STATS=1" in words or "VLLM_NO_USAGE_STATS" in os.environ
    command = words[words.index("serve") :]
    assert command[1] == str(place / "dflash")
    assert command[2:8] == ["--host", "127.0.0.1", "--port", "8231", "--tensor-parallel-size", "2"]
    shown = [line.split("  ") for line in done.stderr.splitlines()]
    for label, value in (
        ("algorithm", "dflash"),
        ("speculative tokens", "7"),
        ("endpoint", "http://127.0.0.1:8231/v1"),
    ):
        assert [words for words in shown if (words[0], words[-1].strip()) == (label, value)]


def test_a_model_behind_the_options_that_are_passed_on_is_asked_to_come_first(place):
    done = speculators(place, "serve", "--max-model-len", "4096", place / "dflash")
    assert done.returncode == 2
    assert "MODEL is missing in front of --max-model-len" in done.stderr


def test_what_a_user_can_fix_is_one_sentence_and_exit_2(place, tmp_path):
    broken = write_random_draft(tmp_path / "broken", "eagle3", place / "verifier")
    os.truncate(broken / "model.safetensors", 100)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        cases = [
            (["serve", "/no/such/verifier"], "/no/such/verifier: neither a directory nor a hub id"),
            (["serve", place / "verifier", "--port", port], f"--port: {port} on 127.0.0.1 cannot be used"),
            (
                ["serve", place / "verifier", "--port", port, "--hidden-states-path", tmp_path / "states"],
                f"--port: {port} on 127.0.0.1 cannot be used",
            ),
            (["serve", place / "verifier", "--vllm", tmp_path], "has no Python interpreter"),
            (
                ["serve", place / "dflash", "--num-speculative-tokens", "8"],
                "--num-speculative-tokens: 8 is not possible",
            ),
            (["serve", broken], "corrupt or truncated safetensors file"),
            (
                ["serve", place / "verifier", "--aux-layer-ids", "1", "2"],
                "--aux-layer-ids: only with --hidden-states-path",
            ),
            (
                ["extract", "--verifier", "/no/such", "--data", "d", "--output", tmp_path / "o"],
                "/no/such is not a directory",
            ),
            (["quantize", "/no/such", "--output", tmp_path / "q"], "/no/such is not a directory"),
        ]
        for arguments, sentence in cases:
            done = speculators(place, *arguments)
            assert (done.returncode, done.stdout) == (2, ""), (arguments, done.stderr)
            assert sentence in done.stderr
            assert "Traceback" not in done.stderr
    assert not (tmp_path / "states").exists()


def test_bad_input_is_refused_before_a_process_starts_or_a_file_is_written(place, tmp_path):
    corrupt, foreign = (write_random_draft(tmp_path / n, "dflash", place / "verifier") for n in ("corrupt", "foreign"))
    weights = corrupt / "model.safetensors"
    weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
    (foreign / "config.json").write_text('{"model_type": "gpt2", "speculators_model_type": "medusa"}')
    write_tiny_verifier(tmp_path / "wide", hidden_size=128)
    state = tmp_path / "state"
    before = sorted(tmp_path.rglob("*"))
    cases = [
        ((corrupt,), "corrupt or truncated safetensors file"),
        ((foreign,), "unknown algorithm 'medusa'"),
        ((place / "dflash", "--verifier", tmp_path / "wide"), "hidden_size 64"),
        ((place / "dflash", "--num-speculative-tokens", "0"), "--num-speculative-tokens: 0 is not possible"),
        ((place / "dflash", "--num-speculative-tokens", "8"), "it allows 1 to 7"),
        ((place / "dflash", "--num-speculative-tokens", "many"), "--num-speculative-tokens: must be a whole number"),
        ((place / "verifier", "--method", "suffix"), "needs the package arctic-inference"),
        ((place / "verifier", "--method", "magic"), "--method:"),
        ((place / "verifier", "--daemon", "../x"), "cannot be a name"),
        ((place / "verifier", "--wait"), "--wait: only with --daemon NAME"),
        (("status", "nobody"), "no server in the background has this name"),
        (("stop", "one", "two"), "two is not allowed"),
        (("logs", "--port", "9"), "--port is not allowed"),
    ]
    for arguments, sentence in cases:
        done = speculators(place, "serve", *arguments, SPECULATORS_STATE=str(state))
        assert (done.returncode, done.stdout) == (2, ""), (arguments, done.stderr)
        assert sentence in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads everything")
def test_a_directory_that_cannot_be_read_is_named(place, tmp_path):
    write_tiny_verifier(tmp_path / "closed" / "verifier")
    (tmp_path / "closed").chmod(0)
    done = speculators(place, "serve", tmp_path / "closed" / "verifier")
    (tmp_path / "closed").chmod(0o700)
    assert done.returncode == 2
    assert "cannot be read (permission denied)" in done.stderr


def test_a_model_called_status_is_served(place, tmp_path):
    write_tiny_verifier(tmp_path / "status")
    command = [sys.executable, "-m", "speculators", "serve", "status", "--dry-run", "--json"]
    given = {**os.environ, "SPECULATORS_VLLM": str(place / "vllm"), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "status"


def test_vllm_dying_at_its_start_shows_its_last_error_lines(place):
    done = speculators(place, "serve", place / "verifier", "--port", "8232", FAKE_VLLM="die")
    assert done.returncode == 2
    assert "died at its start (exit code 1): ValueError: No room for the KV cache" in done.stderr.splitlines()[-1]


def test_an_extraction_server_is_asked_for_with_default_layers(place):
    done = speculators(place, "serve", place / "verifier", "--hidden-states-path", "/dev/shm/x", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]' in done.stdout
    assert not Path("/dev/shm/x").exists()


def test_quantize_prints_one_json_document(place, tmp_path):
    done = speculators(
        place, "quantize", place / "verifier", "--output", tmp_path / "fp8", "--block", "32,64", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["block"] == [32, 64]


def test_help_needs_neither_vllm_nor_torch(place):
    for command in ("serve", "extract", "quantize"):
        code = (
            "import sys; from speculators.cli import app; sys.argv = ['speculators', sys.argv[1], '--help']\n"
            "try: app()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules and 'vllm' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "--vllm" in done.stdout or command == "quantize"

"""Starting, explaining and ending, with a stand-in for vLLM that has a child process like the real one."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from fake_vllm import environment
from tiny_models import write_tiny_verifier

from serve.spec import free_port, plain_spec
from serve.vllm import foreground, running
from serve.vllm_side.entry import group_members
from speculators.errors import UserError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("vllm")
    environment(root / "vllm")
    write_tiny_verifier(root / "verifier")
    return root


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Reads leader and child of the server that was started last."""
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    return lambda: [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def spec(place):
    return plain_spec(place / "verifier", port=free_port(), vllm=str(place / "vllm"))


def alive(pid):
    return os.path.exists(f"/proc/{pid}") and b") Z" not in open(f"/proc/{pid}/stat", "rb").read()


def test_the_block_gets_an_endpoint_and_leaves_no_process(place, pids, tmp_path):
    with running(spec(place), tmp_path / "log") as endpoint:
        leader, child = pids()
        assert endpoint.model == str(place / "verifier")
        assert endpoint.health()
        assert endpoint.version() == "0.32.0"
        assert endpoint.max_model_len() == 99
        assert endpoint.acceptance_counters() is None
        assert {leader, child} < group_members(leader)
    assert not group_members(leader)
    assert not endpoint.health()


def test_a_child_that_outlives_the_server_is_ended(place, pids, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "orphan")
    with running(spec(place), tmp_path / "log"):
        leader, child = pids()
    assert not group_members(leader)
    assert not alive(child)


def test_an_exception_in_the_block_leaves_no_process(place, pids, tmp_path):
    def interrupted():
        with running(spec(place), tmp_path / "log"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not group_members(pids()[0])


STARTER = """
import sys, time
from pathlib import Path
from serve.spec import plain_spec
from serve.vllm import running
with running(plain_spec(sys.argv[1], vllm=sys.argv[2]), Path(sys.argv[3])):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_starter_that_is_killed_leaves_no_process(place, pids, tmp_path, number):
    command = [sys.executable, "-c", STARTER, place / "verifier", place / "vllm", tmp_path / "log"]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert starter.stdout.readline() == "ready\n"
    leader, child = pids()
    starter.send_signal(number)
    starter.wait()
    deadline = time.monotonic() + 20
    while group_members(leader) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(leader)
    assert not alive(child)


def test_dying_at_the_start_shows_the_cause_and_not_its_consequences(place, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "die")
    cause = r"died at its start \(exit code 1\): ValueError: No room for the KV cache \("
    with pytest.raises(UserError, match=cause) as caught, running(spec(place), tmp_path / "log"):
        pass
    assert "Engine core" not in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)
    with pytest.raises(UserError, match="No room for the KV cache"):
        foreground(spec(place))


def test_a_port_in_use_is_refused_before_anything_starts(place, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = plain_spec(place / "verifier", port=other.getsockname()[1], vllm=str(place / "vllm"))
        for start in (lambda: running(taken, tmp_path / "log").__enter__(), lambda: foreground(taken)):
            with pytest.raises(UserError, match=rf"--port: {taken.port} on 127.0.0.1 cannot be used"):
                start()
    assert not (tmp_path / "log").exists()


def test_the_foreground_gives_the_exit_code_and_leaves_no_process(place, pids, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_VLLM", "quit")
    assert foreground(spec(place)) == 7
    leader, _ = pids()
    assert not group_members(leader)
    assert "Application startup complete" in capsys.readouterr().err


def test_vllm_dying_under_the_block_is_what_the_error_says(place, pids, tmp_path):
    def killed():
        with running(spec(place), tmp_path / "log") as endpoint:
            os.kill(pids()[0], signal.SIGKILL)
            while endpoint.health():
                time.sleep(0.05)
            time.sleep(0.2)
            endpoint.max_model_len()

    with pytest.raises(UserError, match="vLLM died while it served"):
        killed()
    assert not group_members(pids()[0])

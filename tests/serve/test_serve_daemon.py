"""Servers in the background: they outlive their starter, are called dead when they are, leave nothing when stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fake_vllm import environment
from tiny_models import write_tiny_verifier

from serve.daemon import launch, log_of, status_of, stop_server, the_name, wait
from serve.spec import free_port, plain_spec
from serve.state import Process, ServerState, known_names, state_directory
from serve.vllm_side.entry import group_members
from speculators.errors import UserError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("daemon")
    environment(root / "vllm")
    write_tiny_verifier(root / "verifier")
    return root


@pytest.fixture
def spec(place, tmp_path, monkeypatch):
    """A server that can be launched; whatever is left of it is stopped at the end."""
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("SPECULATORS_STATE", str(tmp_path / "state"))
    yield plain_spec(place / "verifier", port=free_port(), vllm=str(place / "vllm"))
    for name in known_names():
        stop_server(name)


def until(condition):
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run(place, *arguments):
    given = {**os.environ, "SPECULATORS_VLLM": str(place / "vllm"), "COLUMNS": "200"}
    command = [sys.executable, "-m", "speculators", "serve", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=given)


def test_the_command_line_starts_looks_at_and_stops_a_server_that_outlives_it(place, spec, tmp_path):
    started = run(place, place / "verifier", "--port", spec.port, "--daemon", "mine", "--wait", "--json")
    assert started.returncode == 0, started.stderr
    told = json.loads(started.stdout)
    assert (told["name"], told["status"], told["url"]) == ("mine", "ready", f"{spec.base_url}/v1")
    assert os.stat(state_directory() / "mine.json").st_mode & 0o077 == 0
    again = run(place, place / "verifier", "--port", free_port(), "--daemon", "mine")
    assert (again.returncode, again.stdout) == (2, "")
    assert "--daemon: mine runs already" in again.stderr
    assert json.loads(run(place, "status", "--json").stdout)["servers"] == [told]
    assert "Application startup complete" in run(place, "logs", "mine").stdout
    leader = ServerState.read("mine").server.pid
    assert group_members(leader)
    stopped = run(place, "stop")
    assert (stopped.returncode, stopped.stdout) == (0, "mine stopped\n")
    assert not group_members(leader)
    gone = run(place, "status", "mine")
    assert gone.returncode == 2
    assert "no server in the background has this name" in gone.stderr


def test_a_killed_server_is_dead_and_its_name_is_free(spec, tmp_path):
    state = launch("mine", spec)
    wait(state, 60)
    leader, child = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    assert status_of("mine").status == "ready"
    os.kill(leader, signal.SIGKILL)
    until(lambda: not state.supervisor.is_alive())
    assert (status_of("mine").status, status_of("mine").exit_code) == ("dead", -signal.SIGKILL)
    assert Process.of(child) is None
    wait(launch("mine", spec), 60)
    assert status_of("mine").status == "ready"
    assert not stop_server("mine").was_dead
    assert not group_members(int((tmp_path / "pids").read_text().split()[0]))


def test_a_killed_supervisor_takes_its_server_along(spec, tmp_path):
    state = launch("mine", spec)
    wait(state, 60)
    leader = ServerState.read("mine").server.pid
    os.kill(state.supervisor.pid, signal.SIGKILL)
    until(lambda: not group_members(leader))
    assert status_of("mine").status == "dead"
    assert stop_server("mine").was_dead


def test_waiting_for_a_server_that_dies_tells_why_and_keeps_only_its_log(spec, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "die")
    with pytest.raises(UserError, match=r"died at its start \(exit code 1\): ValueError: No room for the KV cache"):
        wait(launch("mine", spec), 60)
    assert known_names() == []
    assert "No room" in log_of("mine").read_text()


def test_a_process_that_got_the_id_of_a_dead_server_is_left_alone(spec):
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    reused = Process.of(bystander.pid).model_copy(update={"started": "another boot:1"})
    stale = ServerState(
        name="mine", supervisor=reused, server=reused, spec=spec, log=state_directory() / "mine.log", started_at="then"
    )
    stale.write()
    assert status_of("mine").status == "dead"
    assert stop_server("mine").was_dead
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    assert bystander.returncode == 0


def test_what_cannot_be_meant_is_refused(spec):
    with pytest.raises(UserError, match="there is no server in the background"):
        the_name(None)
    for name in ("", "../mine", "a b", "x" * 65):
        with pytest.raises(UserError, match="cannot be a name"):
            launch(name, spec)
    with pytest.raises(UserError, match="no log of a server called mine"):
        log_of("mine")
    taken = spec.model_copy(update={"host": "999.1.1.1"})
    with pytest.raises(UserError, match=r"--port: .* cannot be used"):
        launch("mine", taken)
    assert known_names() == []

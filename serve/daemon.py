"""Servers in the background by name: start, wait, look, stop. What is known about them is in `serve/state.py`.

A supervisor of ours (`serve/supervisor.py`) holds the server; ending it ends vLLM and all its children.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

from serve.command import ServeSpec
from serve.endpoint import is_healthy
from serve.explain import explain
from serve.state import Process, ServerState, known_names, locked, log_file, state_file
from serve.vllm import STOP_TIMEOUT_S, check_start, tail, wait_until_ready
from serve.vllm_side.entry import group_members
from speculators.errors import UserError
from speculators.schema import Strict

_POLL_S = 0.05
_LISTENING = b"Application startup complete"
_STARTING_BYTES = 4 << 20


class ServerStatus(Strict):
    """How a server in the background is.

    Attributes:
        status: `ready` answers; `starting` does not yet; `silent` did, and does not any more; `dead` has ended.
        reason: for a dead one, what vLLM said last.
    """

    name: str
    status: Literal["ready", "starting", "silent", "dead"]
    model: str
    url: str
    pid: int
    started_at: str
    log: Path
    exit_code: int | None = None
    reason: str = ""


class Stopped(NamedTuple):
    """A server that was stopped, and whether it was dead already."""

    name: str
    was_dead: bool


def launch(name: str, spec: ServeSpec) -> ServerState:
    """Start `spec` in the background and return at once.

    Raises:
        UserError: the name is in use or cannot be one, the port is in use, or memory is short.
    """
    with locked(name):
        present = ServerState.read(name)
        if present and present.supervisor.is_alive():
            raise UserError(
                f"--daemon: {name} runs already (process {present.supervisor.pid}, {present.spec.base_url}); stop it "
                f"with `speculators serve stop {name}`, or choose another name."
            )
        check_start(spec)
        state_file(name).unlink(missing_ok=True)
        log = log_file(name)
        log.touch(mode=0o600)
        with log.open("wb") as output:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "serve.supervisor"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                text=True,
            )
        process = Process.of(supervisor.pid)
        if process is None:
            raise UserError(f"--daemon: the supervisor of {name} died at once; see {log}.")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        state = ServerState(name=name, supervisor=process, spec=spec, log=log, started_at=now)
        state.write()
        assert supervisor.stdin is not None
        with suppress(BrokenPipeError), supervisor.stdin as line:  # now that the state is there it may go on
            line.write(name)
    return state


def wait(state: ServerState, timeout_s: float) -> None:
    """Return when the server answers; one that does not is stopped and forgotten, its log is kept.

    Raises:
        UserError: it died (why is in the sentence), or did not answer in time.
    """

    def poll() -> int | None:
        if state.supervisor.is_alive():
            return None
        now = ServerState.read(state.name)
        return -signal.SIGKILL if now is None or now.exit_code is None else now.exit_code

    try:
        wait_until_ready(state.spec, poll, state.log, timeout_s)
    except BaseException:
        stop_server(state.name)
        raise


def stop_server(name: str) -> Stopped:
    """End the server and everything it started, wait until it is gone, and forget it. Its log is kept.

    Raises:
        UserError: no server of this name.
    """
    with locked(name):
        state = _state(name)
        was_dead = not state.supervisor.is_alive()
        if not was_dead or (state.server and state.server.is_alive()):
            state.supervisor.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_TIMEOUT_S + 5
            while _is_there(state) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                state = _state(name)
            if _is_there(state):
                state.supervisor.signal(signal.SIGKILL)
                if state.server:
                    with suppress(ProcessLookupError):
                        os.killpg(state.server.pid, signal.SIGKILL)
        state_file(name).unlink(missing_ok=True)
    return Stopped(name, was_dead)


def status_of(name: str) -> ServerStatus:
    """How the server of this name is now.

    Raises:
        UserError: no server of this name.
    """
    state = _state(name)
    alive = state.supervisor.is_alive()
    reason = "" if alive else explain(tail(state.log)) if state.log.exists() else "its log is gone"
    return ServerStatus(
        name=name,
        status=_live_status(state) if alive else "dead",
        model=state.spec.draft or state.spec.model,
        url=f"{state.spec.base_url}/v1",
        pid=state.supervisor.pid,
        started_at=state.started_at,
        log=state.log,
        exit_code=state.exit_code,
        reason=reason,
    )


def the_name(given: str | None) -> str:
    """The name that is meant: as given, or the only one there is.

    Raises:
        UserError: none is given, and there is not exactly one server.
    """
    names = known_names()
    if given is None and len(names) != 1:
        there = f"there are {', '.join(names)}" if names else "there is no server in the background"
        raise UserError(
            f"NAME is missing, and {there}; give one, or start one with `speculators serve ... --daemon NAME`."
        )
    return given or names[0]


def log_of(name: str) -> Path:
    """The log of a server, also of one that was stopped.

    Raises:
        UserError: no server of this name has ever been started, or its log was removed.
    """
    log = log_file(name)
    if not log.exists():
        raise UserError(
            f"{log}: there is no log of a server called {name}; known are {', '.join(known_names()) or 'none'}."
        )
    return log


def _state(name: str) -> ServerState:
    state = ServerState.read(name)
    if state is None:
        raise UserError(
            f"{name}: no server in the background has this name; known are {', '.join(known_names()) or 'none'}."
        )
    return state


def _is_there(state: ServerState) -> bool:
    return state.supervisor.is_alive() or bool(state.server and group_members(state.server.pid))


def _live_status(state: ServerState) -> Literal["ready", "starting", "silent"]:
    if is_healthy(state.spec.base_url):
        return "ready"
    with state.log.open("rb") as log:
        return "silent" if _LISTENING in log.read(_STARTING_BYTES) else "starting"

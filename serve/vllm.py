"""Start vLLM, wait until it is ready, say why when it dies, and leave no process behind.

vLLM has children (engine, workers). It runs in a session of its own; the whole process group is ended when the block
ends, by whatever way. Should this process be killed outright, the guard in `vllm_side/entry.py` does it.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rich.console import Console

from serve.command import ServeSpec
from serve.endpoint import Endpoint, is_healthy
from serve.explain import explain
from serve.memory import check_memory
from serve.vllm_side.entry import ASKED_S, GUARDED, ORPHANED_S, group_members
from speculators.errors import UserError

STOP_TIMEOUT_S = 2 * ASKED_S + ORPHANED_S + 5
_POLL_S = 0.25
_TAIL_BYTES = 256 << 10


@contextmanager
def running(spec: ServeSpec, log_path: Path | None = None, timeout_s: float = 600) -> Iterator[Endpoint]:
    """Serve `spec` for the length of the block.

    Args:
        spec: what to start.
        log_path: gets vLLM's output; None means a temporary file that is kept only when vLLM fails.
        timeout_s: for the start.

    Raises:
        UserError: the port is in use, memory is short, vLLM was not ready in time, it died at its start, or the block
            failed because it died (its last error lines are in the sentence).
    """
    check_start(spec)
    temporary = log_path is None
    log = log_path or Path(tempfile.gettempdir()) / f"speculators-vllm-{os.getpid()}-{spec.port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = start(spec, stdout=output)
    ready = False
    try:
        wait_until_ready(spec, process.poll, log, timeout_s)
        endpoint = Endpoint.connect(spec.base_url)
        ready = True
        yield endpoint
    except Exception as error:
        if not ready or process.poll() is None:
            raise
        raise UserError(f"vLLM died while it served {spec.model}: {explain(tail(log))} (whole log: {log})") from error
    finally:
        well = ready and process.poll() is None
        stop(process)
        if temporary and well:
            log.unlink(missing_ok=True)


def foreground(spec: ServeSpec) -> int:
    """Serve `spec` until it ends or is interrupted, its output on our stderr; signals are passed on.

    Returns:
        vLLM's exit code, 130 when it was interrupted.

    Raises:
        UserError: the port is in use, memory is short, or vLLM died before it was ready (its last error
            lines are in the sentence).
    """
    check_start(spec)
    process = start(spec, stdout=subprocess.PIPE)
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=2000)
    started = threading.Event()
    pump = threading.Thread(target=_pump, args=(process.stdout, tail, started), daemon=True)
    pump.start()
    interrupted = False

    def pass_on(number: int, _frame: object) -> None:
        nonlocal interrupted
        if interrupted:  # asked twice
            os.killpg(process.pid, signal.SIGKILL)
        interrupted = True
        process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        stop(process)
        for number, handler in previous.items():
            signal.signal(number, handler)
    pump.join(timeout=5)
    if interrupted:
        return 130
    if code != 0 and not started.is_set():
        raise UserError(f"vLLM died at its start (exit code {code}): {explain(chr(10).join(tail))}")
    return code if code >= 0 else 128 - code


def check_start(spec: ServeSpec) -> None:
    """Raises UserError when the server cannot start now: its port is taken, or its memory is not there."""
    check_port(spec)
    check_memory(spec)


def check_port(spec: ServeSpec) -> None:
    """Raises UserError when something listens on the port already, or when the host is not ours."""
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((spec.host, spec.port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"--port: {spec.port} on {spec.host} cannot be used ({reason}); "
                "stop what listens there or choose another port."
            ) from None


def start(spec: ServeSpec, stdout: IO[bytes] | int) -> "subprocess.Popen[bytes]":
    """Start vLLM in a process group of its own.

    The pipe on standard input is never written to: its closing, by whatever ends us, tells the guard to act.

    Raises:
        UserError: the interpreter cannot be run.
    """
    try:
        return subprocess.Popen(
            spec.command,
            env={**os.environ, **spec.environment, GUARDED: "1"},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"vLLM could not be started: {spec.command[0]}: {error.strerror}.") from None


def wait_until_ready(spec: ServeSpec, poll: Callable[[], int | None], log: Path, timeout_s: float) -> None:
    """Return when the server answers. `poll` gives its exit code once it has ended.

    Raises:
        UserError: it has ended (why is in the sentence), or does not answer in time.
    """
    started = time.monotonic()
    with Console(stderr=True).status("") as status:
        while not is_healthy(spec.base_url):
            waited = time.monotonic() - started
            code = poll()
            if code is not None:
                raise UserError(f"vLLM died at its start (exit code {code}): {explain(tail(log))} (whole log: {log})")
            if waited > timeout_s:
                raise UserError(
                    f"vLLM was not ready after {timeout_s:.0f} s (log: {log}); its last lines: {explain(tail(log))}"
                )
            status.update(f"starting vLLM for {spec.draft or spec.model} on port {spec.port}: {waited:.0f} s")
            time.sleep(_POLL_S)


def tail(log: Path) -> str:
    """The end of a log, enough for `explain`."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return stream.read().decode("utf-8", "replace")


def _pump(source: IO[bytes], tail: "deque[str]", started: threading.Event) -> None:
    """Copy to stderr and keep the tail; `started` is set by the line that vLLM's web server prints when it listens."""
    for raw in source:
        line = raw.decode("utf-8", "replace").rstrip("\n")
        tail.append(line)
        if "Application startup complete" in line:
            started.set()
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Close the pipe: the guard then ends vLLM, gently first. Wait until the group is gone, then kill what is left.

    A second Ctrl-C while waiting goes straight to the kill.
    """
    assert process.stdin is not None
    try:
        process.stdin.close()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (process.poll() is None or group_members(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""Start vLLM, wait until it is ready, say why when it dies, and leave no process behind.

vLLM has children (engine, workers). It runs in a session of its own; the whole process group is ended when the block
ends, by whatever way. Should this process be killed outright, the guard in `vllm_side/entry.py` does it.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rich.console import Console

from serve.endpoint import Endpoint, is_healthy
from serve.spec import ServeSpec
from serve.vllm_side.entry import ASKED_S, GUARDED, ORPHANED_S, group_members
from speculators.errors import UserError

STOP_TIMEOUT_S = 2 * ASKED_S + ORPHANED_S + 5
_POLL_S = 0.25
_TAIL_BYTES = 256 << 10
_ERROR = re.compile(r"(?:^|\s)((?:[\w.]*(?:Error|Exception)|error)\b: .*|[\w.]*(?:Error|Exception))$")
_CONSEQUENCES = ("Engine core initialization failed", "See root cause above", "WorkerProc initialization failed")


@contextmanager
def running(spec: ServeSpec, log_path: Path | None = None, timeout_s: float = 600) -> Iterator[Endpoint]:
    """Serve `spec` for the length of the block.

    Args:
        spec: what to start.
        log_path: gets vLLM's output; None means a temporary file that is kept only when vLLM fails.
        timeout_s: for the start.

    Raises:
        UserError: the port is in use, vLLM was not ready in time, it died at its start, or the block failed because it
            died (its last error lines are in the sentence).
    """
    check_port(spec)
    temporary = log_path is None
    log = log_path or Path(tempfile.gettempdir()) / f"speculators-vllm-{os.getpid()}-{spec.port}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = _start(spec, stdout=output)
    ready = False
    try:
        _wait_until_ready(spec, process, log, timeout_s)
        endpoint = Endpoint.connect(spec.base_url)
        ready = True
        yield endpoint
    except Exception as error:
        if not ready or process.poll() is None:
            raise
        raise UserError(f"vLLM died while it served {spec.model}: {explain(_tail(log))} (whole log: {log})") from error
    finally:
        well = ready and process.poll() is None
        _stop(process)
        if temporary and well:
            log.unlink(missing_ok=True)


def foreground(spec: ServeSpec) -> int:
    """Serve `spec` until it ends or is interrupted, its output on our stderr; signals are passed on.

    Returns:
        vLLM's exit code, 130 when it was interrupted.

    Raises:
        UserError: the port is in use, or vLLM died before it was ready (its last error lines are in the sentence).
    """
    check_port(spec)
    process = _start(spec, stdout=subprocess.PIPE)
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
        _stop(process)
        for number, handler in previous.items():
            signal.signal(number, handler)
    pump.join(timeout=5)
    if interrupted:
        return 130
    if code != 0 and not started.is_set():
        raise UserError(f"vLLM died at its start (exit code {code}): {explain(chr(10).join(tail))}")
    return code if code >= 0 else 128 - code


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


def explain(log: str, lines: int = 3) -> str:
    """The last lines of vLLM's log that say what went wrong, in order, without prefixes and repetitions."""
    cleaned = [_without_prefix(line) for line in log.splitlines()]
    errors = [
        m[1].strip() for line in cleaned if (m := _ERROR.search(line)) and not any(c in line for c in _CONSEQUENCES)
    ]
    chosen = list(dict.fromkeys(errors)) or [line for line in cleaned if line.strip()]
    return " | ".join(line[:300] for line in chosen[-lines:]) or "it printed nothing"


def _without_prefix(line: str) -> str:
    """Drop `(EngineCore pid=7) ERROR 12-01 08:46:07 [core.py:133] `, colours and indentation."""
    line = re.sub(r"\x1b\[[\d;]*m", "", line).rstrip()
    line = re.sub(r"^(?:\([\w-]+ pid=\d+\)\s*)+", "", line)
    return re.sub(r"^(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s?", "", line)


def _start(spec: ServeSpec, stdout: IO[bytes] | int) -> "subprocess.Popen[bytes]":
    """The pipe on standard input is never written to: its closing, by whatever ends us, tells the guard to act."""
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


def _wait_until_ready(spec: ServeSpec, process: "subprocess.Popen[bytes]", log: Path, timeout_s: float) -> None:
    started = time.monotonic()
    with Console(stderr=True).status("") as status:
        while not is_healthy(spec.base_url):
            waited = time.monotonic() - started
            if process.poll() is not None:
                raise UserError(
                    f"vLLM died at its start (exit code {process.returncode}): {explain(_tail(log))} (whole log: {log})"
                )
            if waited > timeout_s:
                raise UserError(
                    f"vLLM was not ready after {timeout_s:.0f} s (log: {log}); its last lines: {explain(_tail(log))}"
                )
            status.update(f"starting vLLM for {spec.draft or spec.model} on port {spec.port}: {waited:.0f} s")
            time.sleep(_POLL_S)


def _tail(log: Path) -> str:
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


def _stop(process: "subprocess.Popen[bytes]") -> None:
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

"""What is known about servers in the background: a JSON file each in the user's state directory.

A process id is used again once its process has ended; a `Process` therefore holds the start time too.
"""

import fcntl
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from serve.command import ServeSpec
from speculators.errors import UserError
from speculators.schema import Strict, read_json, write_json

ENVIRONMENT_VARIABLE = "SPECULATORS_STATE"


class Process(Strict):
    """One process for all time: its id, and when it was started (boot id, clock ticks since boot)."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The process that has this id now; None when there is none, or only its remains (a zombie)."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return None if fields[0] in "ZX" else cls(pid=pid, started=f"{boot}:{fields[19]}")

    def is_alive(self) -> bool:
        """Whether this very process still runs."""
        return Process.of(self.pid) == self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, never to another process that got the id."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ServerState(Strict):
    """A server in the background.

    Attributes:
        supervisor: our process that holds the server; while it lives, the server is meant to run.
        server: leader of vLLM's process group, None until the supervisor has started it.
        exit_code: vLLM's, once it has ended on its own.
    """

    name: str
    supervisor: Process
    server: Process | None = None
    spec: ServeSpec
    log: Path
    started_at: str
    exit_code: int | None = None

    @classmethod
    def read(cls, name: str) -> Self | None:
        """The state of `name`; None when there is none.

        Raises:
            UserError: a name that cannot be one, or a file that is not a state.
        """
        file = state_file(name)
        return read_json(file, cls, "a server's state") if file.exists() else None

    def write(self) -> None:
        """Write it, readable for this user alone: the command may hold a key."""
        directory = state_directory()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(state_file(self.name), self)
        state_file(self.name).chmod(0o600)


def state_directory() -> Path:
    """$SPECULATORS_STATE, or `speculators/servers` in the user's state directory ($XDG_STATE_HOME, ~/.local/state)."""
    given = os.environ.get(ENVIRONMENT_VARIABLE)
    state_home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(given) if given else Path(state_home) / "speculators" / "servers"


def state_file(name: str) -> Path:
    """Where the state of `name` lies.

    Raises:
        UserError: not a name.
    """
    return _place(name, "json")


def log_file(name: str) -> Path:
    """Where the output of `name` goes."""
    return _place(name, "log")


def known_names() -> list[str]:
    """Names of all servers that have a state, running or not."""
    return sorted(file.stem for file in state_directory().glob("*.json") if not file.name.startswith("."))


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One at a time starts or stops the server of this name."""
    file = _place(name, "lock")
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _place(name: str, suffix: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name):
        raise UserError(
            f"--daemon: {name!r} cannot be a name; give up to 64 letters, digits, dots, dashes and underscores."
        )
    return state_directory() / f"{name}.{suffix}"

"""The process that holds a server in the background: `python -m serve.supervisor`, a name on standard input.

vLLM's guard ends vLLM when its starter is gone, so the starter must stay; this is all it does. It waits for the name
until its own state is written down, and ends when vLLM ends or when it is asked to (SIGTERM).
"""

import signal
import sys
from typing import NoReturn

from serve.state import Process, ServerState, state_file
from serve.vllm import start, stop


def main() -> int:
    """Serve until asked to end. Gives vLLM's exit code, which the state gets too."""
    state = ServerState.read(sys.stdin.readline().strip() or "-")
    assert state is not None
    with state.log.open("ab") as output:
        process = start(state.spec, stdout=output)
    code: int | None = None
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # until here such a signal's own effect is right
            signal.signal(number, _end)
        state = state.model_copy(update={"server": Process.of(process.pid)})
        state.write()
        code = process.wait()
    finally:
        stop(process)
    if state_file(state.name).exists():
        state.model_copy(update={"exit_code": code}).write()
    return code


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())

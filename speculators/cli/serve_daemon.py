"""Servers in the background on the command line: `serve --daemon NAME`, `serve status`, `serve logs`, `serve stop`."""

import json
import shutil
import sys

from serve.command import ServeSpec
from serve.daemon import ServerStatus, launch, log_of, status_of, stop_server, the_name, wait
from serve.options import ServeOptions
from serve.state import known_names


def start(name: str, spec: ServeSpec, options: ServeOptions) -> None:
    """Start in the background, wait if asked to, and print how it is."""
    state = launch(name, spec)
    if options.wait:
        wait(state, options.wait_s)
    status = status_of(name)
    print(status.model_dump_json(indent=2) if options.json_output else _line(status))


def run(command: str, name: str | None, as_json: bool) -> None:
    """One of `status`, `logs` and `stop`. `status` of a NAME that is dead ends with exit code 1."""
    if command == "status":
        statuses = [status_of(known) for known in ([name] if name else known_names())]
        _show(statuses, as_json)
        if name and statuses[0].status == "dead":
            raise SystemExit(1)
    elif command == "logs":
        with log_of(the_name(name)).open(encoding="utf-8", errors="replace") as log:
            shutil.copyfileobj(log, sys.stdout)
    else:
        stopped = stop_server(the_name(name))
        how = "was dead already" if stopped.was_dead else "stopped"
        print(json.dumps(stopped._asdict()) if as_json else f"{stopped.name} {how}")


def _show(statuses: list[ServerStatus], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"servers": [status.model_dump(mode="json") for status in statuses]}, indent=2))
    elif statuses:
        print("\n".join(map(_line, statuses)))
    else:
        print("no server in the background", file=sys.stderr)


def _line(status: ServerStatus) -> str:
    line = f"{status.name}  {status.status}  {status.url}  {status.model}  (process {status.pid}, log {status.log})"
    code = "" if status.exit_code is None else f" (exit code {status.exit_code})"
    return f"{line}\n    ended{code}: {status.reason}" if status.status == "dead" else line

"""`speculators serve`, and `speculators serve status|logs|stop` for servers in the background.

`status`, `logs` and `stop` in MODEL's place are these commands, unless something of that name lies here.
"""

import shlex
import sys
from pathlib import Path

from serve.command import ServeSpec
from serve.memory import memory_line
from serve.options import ServeOptions, spec_of
from speculators.cli.options import schema_command
from speculators.errors import UserError

_COMMANDS = ("status", "logs", "stop")


def run(options: ServeOptions) -> None:
    """Show what is served, then serve until interrupted; ends with vLLM's exit code."""
    if options.model in _COMMANDS and not Path(options.model).exists():
        from speculators.cli import serve_daemon

        serve_daemon.run(options.model, _name(options), options.json_output)
        return
    spec = spec_of(options)
    print(_block(spec), file=sys.stderr)
    if options.dry_run:
        print(spec.model_dump_json(indent=2) if options.json_output else _shell(spec))
        return
    from serve.vllm import check_start, foreground

    if options.hidden_states_path:
        check_start(spec)  # nothing is written for a server that cannot start
        options.hidden_states_path.mkdir(parents=True, exist_ok=True)
    if options.daemon:
        from speculators.cli import serve_daemon

        serve_daemon.start(options.daemon, spec, options)
        return
    code = foreground(spec)
    if code:
        raise SystemExit(code)


def _name(options: ServeOptions) -> str | None:
    """NAME of `speculators serve status NAME`; it arrives where the words for vLLM do."""
    others = sorted(options.model_fields_set - {"model", "vllm_args", "json_output"})
    words = [*options.vllm_args, *(f"--{name.replace('_', '-')}" for name in others)]
    if len(words) > 1 or (words and words[0].startswith("-")):
        unknown = next(word for word in words if word.startswith("-") or word is words[-1])
        raise UserError(
            f"speculators serve {options.model}: {unknown} is not allowed; give NAME, and --json or nothing."
        )
    return words[0] if words else None


def _block(spec: ServeSpec) -> str:
    lines = [*spec.summary(), ("memory", memory_line(spec)), *(("note", note) for note in spec.notes)]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines)


def _shell(spec: ServeSpec) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    return " \\\n".join([*variables, shlex.join(spec.command)])


command = schema_command(ServeOptions, run, pass_unknown_to="vllm_args")

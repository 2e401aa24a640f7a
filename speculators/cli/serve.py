"""`speculators serve`."""

import shlex
import sys

from serve.options import ServeOptions, spec_of
from serve.spec import ServeSpec
from speculators.cli.options import schema_command


def run(options: ServeOptions) -> None:
    """Show what is served, then serve until interrupted; ends with vLLM's exit code."""
    spec = spec_of(options)
    print(_block(spec), file=sys.stderr)
    if options.dry_run:
        print(_shell(spec))
        return
    from serve.vllm import foreground

    if options.hidden_states_path:
        options.hidden_states_path.mkdir(parents=True, exist_ok=True)
    code = foreground(spec)
    if code:
        raise SystemExit(code)


def _block(spec: ServeSpec) -> str:
    lines = spec.summary()
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines)


def _shell(spec: ServeSpec) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    return " \\\n".join([*variables, shlex.join(spec.command)])


command = schema_command(ServeOptions, run, pass_unknown_to="vllm_args")

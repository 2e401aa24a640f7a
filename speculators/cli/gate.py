"""`speculators gate`."""

import typer

from bench.gate import GateOptions, check, to_summary
from speculators.cli.options import schema_command


def run(options: GateOptions) -> None:
    """Check, write the files, print the summary; exit code 1 when the gate fails."""
    gate = check(options)
    print(gate.model_dump_json(indent=2) if options.json_output else to_summary(gate), end="")
    if not gate.passed:
        raise typer.Exit(1)


command = schema_command(GateOptions, run)

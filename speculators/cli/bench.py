"""`speculators bench`."""

from bench.suite import BenchOptions
from speculators.cli.options import schema_command


def run(options: BenchOptions) -> None:
    """Measure, then write and print the report."""
    from rich.console import Console

    from bench.report import build
    from bench.run import run_bench
    from speculators.cli.report import show

    if run_bench(options, Console(stderr=True)) is not None:
        show(build(options.output), options.output, options.json_output)


command = schema_command(BenchOptions, run, config_flags=("--config", "--suite"))

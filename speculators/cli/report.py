"""`speculators report`, and the printing of a report that `speculators bench` shares."""

from pathlib import Path
from typing import TYPE_CHECKING

from bench.imports import is_foreign
from bench.report import Report, ReportOptions, build
from speculators.cli.options import schema_command
from speculators.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

_UNLIMITED = 1000


def run(options: ReportOptions) -> None:
    """Render the report again."""
    report = build(*options.run, margin=options.margin, force=options.force)
    show(report, options.output or _own_directory(options.run[0]), options.json_output)


def _own_directory(run: str) -> Path:
    if is_foreign(run):
        raise UserError(f"--output is missing: {run} is one file and no bench directory; say where the report goes.")
    return Path(run)


def show(report: Report, directory: Path, as_json: bool) -> None:
    """Write the report's files and print its table, or the report itself as JSON, on standard output."""
    from rich.console import Console
    from rich.text import Text

    from bench.render import write_report
    from bench.summary import load_name
    from bench.tables import TABLE_HEADER, audit_sentences, break_even_sentences, decision_rows, table_rows

    html = write_report(report, directory)
    if as_json:
        print(report.model_dump_json(indent=2))
        return
    console = Console(highlight=False)
    console.print(Text(f"\n{report.headline} {report.detail}".rstrip(), style="bold"), soft_wrap=True)
    for point in report.load_points:
        if len(report.load_points) > 1:
            console.print(Text(f"\nAt {load_name(point)}:"))
        _print_table(console, TABLE_HEADER, table_rows(report, point))
    for row in decision_rows(report):
        if row[1] == report.rows[-1]:
            console.print(Text(f"{row[0]}, {row[1]}, {row[2]}: {row[5]}"), soft_wrap=True)
    for sentence in (*break_even_sentences(report), *audit_sentences(report)):
        console.print(Text(sentence), soft_wrap=True)
    for note in report.notes:
        console.print(Text(note), soft_wrap=True)
    console.print(Text(f"Report: {html}"), soft_wrap=True)


def _print_table(console: "Console", header: list[str], rows: list[list[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for number, title in enumerate(header):
        table.add_column(
            title.replace("acceptance ", "acceptance\n").replace("inter-token ", "inter-token\n"),
            justify="right" if 1 < number < 5 else "left",
            no_wrap=True,
        )
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*(Text(cell) for cell in row), end_section=following is not None and following[0] != row[0])
    needed = Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum
    console.width = max(console.width, needed)  # a wrapped line is better than a number cut off
    console.print(table)


command = schema_command(ReportOptions, run)

"""`speculators report`, and the printing of a report that `speculators bench` shares."""

from pathlib import Path

from bench.report import Report, ReportOptions, build
from speculators.cli.options import schema_command

_UNLIMITED = 1000


def run(options: ReportOptions) -> None:
    """Render the report again."""
    show(build(options.run, options.margin), options.run, options.json_output)


def show(report: Report, directory: Path, as_json: bool) -> None:
    """Write the report's files and print its table, or the report itself as JSON, on standard output."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from bench.render import TABLE_HEADER, table_rows, write_report

    html = write_report(report, directory)
    if as_json:
        print(report.model_dump_json(indent=2))
        return
    console = Console(highlight=False)
    console.print(Text(f"\n{report.headline} {report.detail}".rstrip(), style="bold"), soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for number, title in enumerate(TABLE_HEADER):
        table.add_column(
            title.replace("acceptance ", "acceptance\n").replace("inter-token ", "inter-token\n"),
            justify="right" if 1 < number < 5 else "left",
            no_wrap=True,
        )
    rows = table_rows(report)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(*(Text(cell) for cell in row), end_section=following is not None and following[0] != row[0])
    needed = Measurement.get(console, console.options.update(width=_UNLIMITED), table).maximum
    console.width = max(console.width, needed)  # a wrapped line is better than a number cut off
    console.print(table)
    for note in report.notes:
        console.print(Text(note), soft_wrap=True)
    console.print(Text(f"Report: {html}"), soft_wrap=True)


command = schema_command(ReportOptions, run)

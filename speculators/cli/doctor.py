"""`speculators doctor`."""

from pathlib import Path
from typing import Any, Optional

import typer
from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from speculators.cli.options import options_from_file, resolve, schema_command
from speculators.errors import UserError
from speculators.schema import Strict
from speculators.training.options import TrainOptions

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
_OF_ONE_CALL = ("json_output", "dry_run", "restart")


def _unset(field: FieldInfo) -> tuple[Any, Any]:
    """The same option, None unless given: a run directory's own value counts then."""
    made = Field(None, description=field.description, json_schema_extra=field.json_schema_extra)
    return Optional[field.annotation], made  # noqa: UP045 - a type known only at run time


_RUN: Any = Field(
    None,
    description="Run directory, or a YAML file of a run's options; an option given here beats it.",
    json_schema_extra={"argument": True},
)
DoctorOptions = create_model(  # type: ignore[call-overload]
    "DoctorOptions",
    __base__=Strict,
    __doc__="Check verifier, data, hidden states and options before hours of training are spent.",
    run=(Path | None, _RUN),
    **{name: _unset(field) for name, field in TrainOptions.model_fields.items()},
)


def run(options: Strict) -> None:
    """Check and print; exits with 1 when a finding is an error."""
    given = options.model_dump(exclude_none=True)
    place: Path | None = given.pop("run", None)
    as_json = given.pop("json_output", False)
    saved = _saved(place) if place else {}
    asked = resolve(TrainOptions, {**saved, **given})
    from speculators.doctor import diagnose, gather

    directory = place if place and place.is_dir() else None
    diagnosis = diagnose(gather(asked, directory))
    if as_json:
        print(diagnosis.model_dump_json(indent=2))
    else:
        _show(diagnosis.findings)
    if diagnosis.errors:
        raise typer.Exit(1)


def _saved(place: Path) -> dict[str, Any]:
    file = place / "run.yaml" if place.is_dir() else place
    if not file.exists():
        raise UserError(
            f"{place}: no run.yaml there; give a run directory, a YAML file, or the options of `speculators train`."
        )
    return {name: value for name, value in options_from_file(file, TrainOptions).items() if name not in _OF_ONE_CALL}


def _show(findings: Any) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", "finding", box=SIMPLE_HEAD)
    for finding in findings:
        table.add_row(finding.check, Text(finding.level, style=_STYLES[finding.level]), Text(finding.sentence))
    console = Console(highlight=False)
    console.print(table)


command = schema_command(DoctorOptions, run)

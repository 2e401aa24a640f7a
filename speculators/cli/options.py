"""Command-line options from a typed schema: flags, YAML file and defaults have one source, each default written once.

A flag beats the file, the file beats the default. `schema_command` makes the command; the schema's field descriptions
are the help. A tuple field takes several values after one flag (`--data a.jsonl b.jsonl`) or comma-separated ones.
"""

import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
import yaml
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from speculators.errors import UserError
from speculators.schema import Strict, validate

OptionsT = TypeVar("OptionsT", bound=Strict)


def schema_command(
    schema: type[OptionsT],
    run: Callable[[OptionsT], None],
    *,
    pass_unknown_to: str | None = None,
    config_flags: tuple[str, ...] = ("--config",),
) -> TyperCommand:
    """Make a command whose options are the fields of `schema` and whose body is `run(options)`.

    Args:
        schema: the options; a field without a default is required (by flag or by file). Extra flag names (`-tp`) come
            from `json_schema_extra={"flags": [...]}`; `json_schema_extra={"argument": True}` makes it positional.
        run: called with the resolved options.
        pass_unknown_to: name of a tuple field that receives every option the schema does not know, untouched.
        config_flags: what the YAML file may be called by; the first one's name is `config`.
    """

    def body(ctx: typer.Context, **given: Any) -> None:
        file = given.pop("config", None)
        values = options_from_file(file, schema) if file else {}
        values.update({name: value for name, value in given.items() if value not in (None, [], ())})
        if pass_unknown_to:
            _check_arguments_first(schema, values)
            values[pass_unknown_to] = (*values.get(pass_unknown_to, ()), *ctx.args)
        run(resolve(schema, values, verbatim=pass_unknown_to))

    fields = {name: field for name, field in schema.model_fields.items() if name != pass_unknown_to}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [_parameter(name, field) for name, field in fields.items()]
    config = Annotated[
        Path | None, typer.Option(*config_flags, help="YAML file with any of these options; a flag beats it.")
    ]
    parameters.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config))
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {p.name: p.annotation for p in parameters}
    body.__doc__ = inspect.getdoc(schema)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    context = {"allow_extra_args": True, "ignore_unknown_options": True} if pass_unknown_to else {}
    variadic = {flag for name, field in fields.items() if _is_tuple(field) for flag in _flags(name, field)}
    app.command(cls=_variadic_command(variadic), context_settings=context)(body)
    return typer.main.get_command(app)  # type: ignore[return-value]


def _check_arguments_first(schema: type[Strict], values: dict[str, Any]) -> None:
    """An unknown option in front of a positional argument would be taken for it: whether it has a value is unknown."""
    for name, field in schema.model_fields.items():
        value = values.get(name)
        if _is_argument(field) and isinstance(value, str) and value.startswith("-"):
            raise UserError(
                f"{name.upper()} is missing in front of {value}; give it before the options that are passed on."
            )


def resolve(schema: type[OptionsT], values: dict[str, Any], verbatim: str | None = None) -> OptionsT:
    """Validate raw values; the sentence names options by their flags. `verbatim` names a field not split at commas."""
    for name, field in schema.model_fields.items():
        if values.get(name) is not None and _is_tuple(field) and name != verbatim:
            values[name] = _split(values[name])
        if field.is_required() and name not in values:
            shown = name.upper() if _is_argument(field) else f"--{_kebab(name)}"
            raise UserError(f"{shown} is missing: {field.description}")
    try:
        return validate(schema, values, "")
    except UserError as error:
        key, _, rest = str(error).removeprefix(": ").partition(":")
        raise UserError(
            f"--{_kebab(key)}:{rest}" if key in schema.model_fields else str(error).removeprefix(": ")
        ) from None


def save_resolved(options: Strict, path: Path) -> None:
    """Write the resolved options as YAML; `--config PATH` runs them again."""
    from speculators.schema import write_text

    write_text(path, yaml.safe_dump(options.model_dump(mode="json"), sort_keys=False))


def options_from_file(file: Path, schema: type[Strict]) -> dict[str, Any]:
    """The values in a YAML file of options; raises UserError when it is unreadable or has an unknown key."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"--config: {file} cannot be read ({error.strerror}).") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config: {file} is not valid YAML ({str(error).splitlines()[0]}).") from None
    unknown = [key for key in values if key not in schema.model_fields]
    if unknown:
        raise UserError(
            f"--config: {file} has the unknown key {unknown[0]!r}; known keys are {', '.join(schema.model_fields)}."
        )
    return dict(values)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    help_text = (field.description or "") + _default_note(field)
    inner = _inner_type(field.annotation)
    annotation: Any
    if _is_argument(field):
        kind = list[str] | None if _is_tuple(field) else inner | None
        annotation = Annotated[kind, typer.Argument(help=help_text, show_default=False)]
    else:
        flags = _flags(name, field)
        if inner is bool:
            flags[0] = f"{flags[0]}/--no-{_kebab(name)}"
        option = typer.Option(*flags, help=help_text, show_default=False, metavar=_metavar(field))
        annotation = Annotated[list[str] | None if _is_tuple(field) else inner | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default_note(field: FieldInfo) -> str:
    if field.is_required():
        return " (required)"
    default = field.get_default(call_default_factory=True)
    if default in (None, (), ""):
        return ""
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f" (default: {shown})"


def _inner_type(annotation: Any) -> Any:
    """The type click parses: `X | None` -> X, a literal or a tuple -> str (pydantic checks the rest)."""
    if get_origin(annotation) is Annotated:
        return _inner_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [a for a in get_args(annotation) if a is not type(None)]
        return _inner_type(inner[0]) if len(inner) == 1 else str
    return annotation if annotation in (int, float, bool, str, Path) else str


def _is_tuple(field: FieldInfo) -> bool:
    annotation = field.annotation
    candidates = [annotation, *get_args(annotation)]
    return any(get_origin(candidate) is tuple for candidate in candidates)


def _extra(field: FieldInfo) -> dict[str, Any]:
    return typing.cast(dict[str, Any], field.json_schema_extra or {})


def _is_argument(field: FieldInfo) -> bool:
    return bool(_extra(field).get("argument"))


def _flags(name: str, field: FieldInfo) -> list[str]:
    return [f"--{_kebab(name)}", *_extra(field).get("flags", [])]


def _metavar(field: FieldInfo) -> str | None:
    literal = next((a for a in (field.annotation, *get_args(field.annotation)) if get_origin(a) is Literal), None)
    return "|".join(map(str, get_args(literal))) if literal else None


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _split(values: Any) -> list[Any]:
    if not isinstance(values, list | tuple):  # a file may hold a single value
        values = [values]
    return [
        part for value in values for part in (value.split(",") if isinstance(value, str) else [value]) if part != ""
    ]


def _variadic_command(variadic: set[str]) -> type[TyperCommand]:
    """A command on which `--data a b` means `--data a --data b`."""

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            expanded: list[str] = []
            current: str | None = None
            for arg in args:
                if current and not arg.startswith("-"):
                    if expanded[-1] != current:
                        expanded.append(current)
                    expanded.append(arg)
                else:
                    current = arg if arg in variadic else None
                    expanded.append(arg)
            return super().parse_args(ctx, expanded)

    return Command

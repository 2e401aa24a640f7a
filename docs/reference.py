"""The generated part of the reference: the command line and the files' JSON Schemas. `python docs/reference.py`.

Read off the very commands and types that run, so nothing is told twice. A test compares what is committed with what
this makes. The trap: whatever is imported here must not import torch, or the test is slow.
"""

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from bench.gate import Gate
from bench.margins import MarginFile
from bench.records import BenchRun, RequestRecord
from bench.report import Report
from bench.suite import BenchOptions
from serve.quantize import Quantization
from speculators.checkpoint import Best
from speculators.cli import COMMANDS
from speculators.convert import Conversion
from speculators.data.cache_index import IndexLine
from speculators.data.cache_manifest import CacheManifest
from speculators.data.regenerate_options import AnswerSettings
from speculators.data.samples import DataManifest
from speculators.data.skipped import SkippedSample
from speculators.prediction import Prediction
from speculators.schema import Strict, write_text
from speculators.training.options import TrainOptions

DIRECTORY = Path(__file__).parent / "reference"
_WORDS = {int: "whole number", float: "number", str: "text", Path: "path"}


class Kind(NamedTuple):
    """A kind of file: the type of the whole file, or of each of its lines."""

    model: type[Strict]
    where: str


SCHEMAS: dict[str, Kind] = {
    "data-manifest": Kind(DataManifest, "`manifest.json` of a data directory"),
    "answers-settings": Kind(AnswerSettings, "settings beside a file of `regenerate`"),
    "cache-manifest": Kind(CacheManifest, "`manifest.json` of a hidden-state cache"),
    "cache-index-line": Kind(IndexLine, "a line of `index/*.jsonl` in a hidden-state cache"),
    "run-options": Kind(TrainOptions, "`run.yaml` of a training run, and what `train --config` takes"),
    "best": Kind(Best, "`best.json` of a training run"),
    "skipped-line": Kind(SkippedSample, "a line of `skipped.jsonl` in a training run"),
    "conversion": Kind(Conversion, "`conversion.json` beside a converted draft"),
    "prediction": Kind(Prediction, "what `replay --output` writes"),
    "quantization": Kind(Quantization, "`quantization.json` in an FP8 copy"),
    "suite": Kind(BenchOptions, "what `bench --config` (or `--suite`) takes"),
    "bench-run": Kind(BenchRun, "`run.json` of a bench run"),
    "request-line": Kind(RequestRecord, "a line of `requests.jsonl` in a bench run"),
    "margins": Kind(MarginFile, "`margins.json` of a bench run"),
    "report": Kind(Report, "`report.json` of a bench run"),
    "gate": Kind(Gate, "what `gate --json` prints"),
}


def generated() -> dict[Path, str]:
    """Every generated file with its text."""
    files = {DIRECTORY / "cli.md": cli_page(), DIRECTORY / "schemas" / "index.md": schemas_page()}
    for name, kind in SCHEMAS.items():
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **kind.model.model_json_schema()}
        files[DIRECTORY / "schemas" / f"{name}.json"] = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    return files


def command_of(name: str) -> Any:
    """A command as the command line runs it: it has `params` and `help`."""
    return importlib.import_module(COMMANDS[name].module).command


def cli_page() -> str:
    """Markdown: a section a command, a row an option."""
    lines = [
        "# Command line",
        "",
        "Made from the commands themselves by `docs/reference.py`. Options may also stand in a YAML file",
        "(`--config FILE`), by the same names with `_` for `-`; a flag beats the file, the file beats the default.",
        "An option that takes several values takes them one after the other or joined by commas.",
        "Exit codes: 0 done, 1 a gate or check failed, 2 something that you can fix (one sentence says what), 130",
        "interrupted (what was finished is kept).",
    ]
    for name, entry in COMMANDS.items():
        command = command_of(name)
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(["speculators", name, *(a.name.upper() for a in arguments), "[OPTIONS]"])
        lines += ["", f"## {name}", "", entry.summary, "", "```text", usage, "```", "", *_paragraphs(command.help)]
        lines += ["", "| option | value | meaning |", "| --- | --- | --- |"]
        lines += [_row(parameter) for parameter in command.params if parameter.name != "help"]
    return "\n".join(lines) + "\n"


def schemas_page() -> str:
    """Markdown: which schema is of which file."""
    lines = [
        "# JSON Schemas",
        "",
        "Made from the types that read and write the files, by `docs/reference.py`. Unknown keys are refused when a",
        "file is read. What the files are for: [File formats](../formats.md).",
        "",
        "| schema | of |",
        "| --- | --- |",
    ]
    return "\n".join([*lines, *(f"| [{name}]({name}.json) | {kind.where} |" for name, kind in SCHEMAS.items())]) + "\n"


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in (text or "").strip().split("\n\n") if part.strip()]


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"| {parameter.name.upper()} | | {_cell(parameter.help)} |"
    flags = ", ".join(f"`{flag}`" for flag in [*parameter.opts, *parameter.secondary_opts])
    return f"| {flags} | {_value(parameter)} | {_cell(parameter.help)} |"


def _value(option: Any) -> str:
    if option.is_flag:
        return ""
    if option.metavar:
        return " or ".join(f"`{choice}`" for choice in option.metavar.split("|"))
    return "texts" if option.multiple else _WORDS[option.type_descriptor.annotation]


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def main() -> None:
    """Write every generated file; a schema of a kind that is gone is removed."""
    files = generated()
    for path in (DIRECTORY / "schemas").glob("*.json"):
        if path not in files:
            path.unlink()
    for path, text in files.items():
        write_text(path, text)


if __name__ == "__main__":
    main()

"""Results of other load generators as a run of ours, so that they appear in the same tables.

`vllm bench serve --save-detailed` (JSON), guidellm (JSON) and AIPerf (JSONL). Which one a file is of is seen from what
it holds, never from its name.
"""

from datetime import UTC, datetime
from pathlib import Path

from bench.imports import aiperf, guidellm, vllm_serve
from bench.imports.foreign import Foreign, as_run
from bench.records import BenchRun, RequestRecord
from speculators.schema import read_json_dict

_WHAT = f"{vllm_serve.WHAT} or {guidellm.WHAT}"


def is_foreign(source: str) -> bool:
    """Whether this names a file of another tool (`FILE` or `NAME=FILE`, .json or .jsonl) and no bench directory."""
    return _parts(source)[1].suffix in (".json", ".jsonl")


def read_foreign(source: str) -> tuple[BenchRun, list[RequestRecord]]:
    """Read `FILE` or `NAME=FILE`; the variant is called NAME, else as the file.

    Raises:
        UserError: missing, or a result of none of the tools.
    """
    name, path = _parts(source)
    foreign = _read(name, path)
    return as_run(name, foreign, datetime.fromtimestamp(path.stat().st_mtime, UTC)), foreign.records


def _read(name: str, path: Path) -> Foreign:
    if path.suffix == ".jsonl":
        return aiperf.read(name, path)
    data = read_json_dict(path, _WHAT)
    reader = guidellm if "benchmarks" in data else vllm_serve
    return reader.read(name, data, str(path))


def _parts(source: str) -> tuple[str, Path]:
    name, equals, path = source.partition("=")
    return (name, Path(path)) if equals and not Path(source).exists() else (Path(source).stem, Path(source))

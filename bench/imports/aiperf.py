"""The JSONL of AIPerf (`profile_export.jsonl`, 0.13), a request a line, and `profile_export_aiperf.json` beside it.

Its `inter_token_latency` is (last - first) / (tokens - 1), our time per output token. The trap: the lines do not tell
the load or the model; without the file beside them the load is the largest number of requests that were in flight. The
n-th session of one file and of another are taken for the same prompt, which holds for equal arguments and seed.
"""

import json
from pathlib import Path
from typing import Any

from bench.imports.foreign import TASK, Foreign
from bench.records import RequestRecord
from speculators.errors import UserError
from speculators.schema import read_json_dict

WHAT = "a profile_export.jsonl of AIPerf"
_SUMMARY_FILE = "profile_export_aiperf.json"
_MEASURED = "profiling"  # the other phase is its warm-up


def read(name: str, path: Path) -> Foreign:
    """Read one export; a last line that was cut off is left out.

    Raises:
        UserError: missing, no lines of AIPerf, or a broken line in the middle.
    """
    rows = [row for row in _lines(path) if row["metadata"].get("benchmark_phase", _MEASURED) == _MEASURED]
    if not rows:
        raise UserError(f"{path}: holds no measured request; expected {WHAT}.")
    try:
        summary = _summary(path)
        point = _point(rows, summary)
        first = min(row["metadata"]["request_start_ns"] for row in rows)
        records = [_record(row, name, point, first) for row in rows]
        span = max(row["metadata"]["request_end_ns"] for row in rows) - first
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read as {WHAT} ({type(error).__name__}: {error}).") from None
    prompts = sorted((record.prompt_id, record.turn, record.prompt_tokens or 0) for record in records)
    tool = f"AIPerf {summary.get('aiperf_version', 'of unknown version')}"
    return Foreign(tool, _model(summary), records, prompts, {point: span / 1e9})


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read as {WHAT} ({error.strerror}).") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break  # half written
            raise UserError(f"{path}: line {number} is not JSON ({error}); expected {WHAT}.") from None
        if not isinstance(row, dict) or not isinstance(row.get("metadata"), dict) or "metrics" not in row:
            raise UserError(f"{path}: line {number} has no metadata and metrics; expected {WHAT}.")
        rows.append(row)
    return rows


def _summary(path: Path) -> dict[str, Any]:
    beside = path.with_name(_SUMMARY_FILE)
    return read_json_dict(beside, "AIPerf's summary") if beside.exists() else {}


def _model(summary: dict[str, Any]) -> str:
    models = summary.get("input_config", {}).get("models", {}).get("items", [])
    return ", ".join(str(model["name"]) for model in models) or "unknown"


def _point(rows: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    phases = summary.get("input_config", {}).get("phases", [])
    load: dict[str, Any] = next((phase for phase in phases if phase.get("kind") == _MEASURED), {})
    if load.get("rate"):
        return f"r{float(load['rate']):g}"
    return f"c{load.get('concurrency') or _most_in_flight(rows)}"


def _most_in_flight(rows: list[dict[str, Any]]) -> int:
    changes = [(row["metadata"]["request_start_ns"], 1) for row in rows]
    changes += [(row["metadata"]["request_end_ns"], -1) for row in rows]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _record(row: dict[str, Any], name: str, point: str, first_ns: int) -> RequestRecord:
    told, metrics = row["metadata"], row["metrics"]
    error = _error(row)
    return RequestRecord(
        variant=name,
        task=TASK,
        point=point,
        prompt_id=str(told["session_num"]),
        turn=int(told.get("turn_index") or 0),
        error=error,
        started_s=(told["request_start_ns"] - first_ns) / 1e9,
        ttft_s=None if error else _seconds(metrics, "time_to_first_token"),
        tpot_s=None if error else _seconds(metrics, "inter_token_latency"),
        e2e_s=None if error else _seconds(metrics, "request_latency"),
        chunk_gaps_s=_gaps(metrics),
        prompt_tokens=_count(metrics, "input_sequence_length") or _count(metrics, "error_isl"),
        output_tokens=_count(metrics, "output_sequence_length"),
    )


def _error(row: dict[str, Any]) -> str | None:
    if row["metadata"].get("was_cancelled"):
        return "cancelled"
    error = row.get("error")
    return str(error.get("message") or error) if isinstance(error, dict) else (str(error) if error else None)


def _seconds(metrics: dict[str, Any], key: str) -> float | None:
    metric = metrics.get(key)
    return None if metric is None else float(metric["value"]) * _SECONDS[metric["unit"]]


_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0}


def _gaps(metrics: dict[str, Any]) -> tuple[float, ...]:
    metric = metrics.get("inter_chunk_latency")
    return tuple(value * _SECONDS[metric["unit"]] for value in metric["value"]) if metric else ()


def _count(metrics: dict[str, Any], key: str) -> int | None:
    metric = metrics.get(key)
    return None if metric is None else int(metric["value"])

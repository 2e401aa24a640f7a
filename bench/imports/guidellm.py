"""The JSON of guidellm (0.8): each benchmark in it is a load point, each request has the prompt that it sent.

The prompts are taken for equal when the options of the data and the seed are; single ones are paired by their text. Its
`inter_token_latency_ms` is (last - first) / (tokens - 1), our time per output token; its `time_per_output_token_ms`
counts from the request's start and is not used. The trap: requests under way when the run ended are `incomplete`: they
neither failed nor may be averaged, so they are left out.
"""

import hashlib
import json
from collections import Counter
from typing import Any

from bench.imports.foreign import TASK, Foreign
from bench.records import RequestRecord
from speculators.errors import UserError

WHAT = "a JSON report of guidellm"


def read(name: str, data: dict[str, Any], path: str) -> Foreign:
    """Read one report.

    Raises:
        UserError: another form than version 0.8 writes, or not a single request.
    """
    try:
        parts = [(_point(benchmark), benchmark) for benchmark in data["benchmarks"]]
        records = [row for point, benchmark in parts for row in _rows(benchmark, name, point)]
        model = str(data["benchmarks"][0]["config"]["backend"]["model"])
        wall_s = {point: benchmark.get("duration") for point, benchmark in parts}
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as {WHAT} ({type(error).__name__}: {error}).") from None
    if not records:
        raise UserError(f"{path}: {WHAT} without a request; was it written with its requests left out?")
    version = data.get("metadata", {}).get("guidellm_version", "of unknown version")
    asked = data.get("config", {}).get("spec", {})
    return Foreign(f"guidellm {version}", model, records, [asked.get("data"), asked.get("seed")], wall_s)


def _point(benchmark: dict[str, Any]) -> str:
    """`rate` arrivals a second, or so many streams."""
    strategy = benchmark["config"]["strategy"]
    if strategy.get("rate"):
        return f"r{float(strategy['rate']):g}"
    streams = strategy.get("streams") or strategy.get("max_concurrency") or 1  # one after another has neither
    return f"c{int(streams)}"


def _rows(benchmark: dict[str, Any], name: str, point: str) -> list[RequestRecord]:
    requests = benchmark["requests"]
    rows = [*(requests["successful"] or ()), *(requests["errored"] or ())]
    rows.sort(key=_started)
    seen: Counter[str] = Counter()
    records = []
    for row in rows:
        prompt = _prompt_id(row)
        records.append(_record(row, name, point, prompt, seen[prompt], _started(rows[0])))
        seen[prompt] += 1
    return records


def _started(row: dict[str, Any]) -> float:
    return float(row["request_start_time"] or row["info"]["timings"]["resolve_start"] or 0.0)


def _prompt_id(row: dict[str, Any]) -> str:
    """The same for the same messages, in any file."""
    body = json.loads(row["request_args"] or "{}").get("body") or {}
    sent = body.get("messages") or body.get("prompt") or row["info"]["conversation_id"]
    return hashlib.sha256(json.dumps(sent).encode()).hexdigest()[:12]


def _record(row: dict[str, Any], name: str, point: str, prompt: str, repeat: int, origin: float) -> RequestRecord:
    error = row["info"].get("error") or (None if row["info"]["status"] == "completed" else row["info"]["status"])
    return RequestRecord(
        variant=name,
        task=TASK,
        point=point,
        prompt_id=prompt,
        repeat=repeat,
        turn=int(row["info"].get("turn_index") or 0),
        error=str(error) if error else None,
        started_s=_started(row) - origin,
        ttft_s=None if error else _seconds(row["time_to_first_token_ms"]),
        tpot_s=None if error else _seconds(row["inter_token_latency_ms"]),
        e2e_s=None if error else row["request_latency"],
        prompt_tokens=row["prompt_tokens"],
        output_tokens=row["output_tokens"],
        text=row["output"] or "",
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000

"""Results of other load generators as a run of ours, so that they appear in the same tables.

So far: the JSON of `vllm bench serve --save-result --save-detailed`. Its requests carry no prompt id: the n-th request
of one file and of another are taken for the same prompt, which holds for equal arguments and seed. The trap: vLLM's
`itl` is the gap between chunks; the time per output token is worked out from the end-to-end time.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from bench.conditions import Conditions, Outcome, Point, TaskInfo, Variant
from bench.records import BenchRun, RequestRecord
from speculators.acceptance import Acceptance
from speculators.errors import UserError
from speculators.provenance import Provenance
from speculators.schema import read_json_dict

_UNKNOWN = "unknown"
_TASK = "imported"
_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "errors")
_WHAT = "a result of `vllm bench serve --save-result --save-detailed`"


def is_foreign(source: str) -> bool:
    """Whether this names a file of another tool (`FILE.json` or `NAME=FILE.json`) and no bench directory."""
    return _parts(source)[1].suffix == ".json"


def read_foreign(source: str) -> tuple[BenchRun, list[RequestRecord]]:
    """Read `FILE.json` or `NAME=FILE.json`; the variant is called NAME, else as the file.

    Raises:
        UserError: missing, or not a detailed result of `vllm bench serve`.
    """
    name, path = _parts(source)
    data = read_json_dict(path, _WHAT)
    missing = [key for key in (*_LISTS, "model_id", "num_prompts") if key not in data]
    if missing:
        raise UserError(f"{path}: has no {missing[0]!r}, so it is not {_WHAT}; measure again with both flags.")
    if len({len(data[key]) for key in _LISTS}) != 1:
        raise UserError(f"{path}: its lists {', '.join(_LISTS)} have unequal lengths; expected {_WHAT}.")
    task, point = _TASK, _point(data)
    records = [_record(data, number, name, task, point) for number in range(len(data["errors"]))]
    failed = sum(not record.ok for record in records)
    measured = Point(
        variant=name,
        task=task,
        point=point,
        num_requests=len(records),
        num_failed=failed,
        requests=None,
        counters=_acceptance(data),
        wall_s=data.get("duration"),
    )
    run = BenchRun(
        conditions=_conditions(data, task, point),
        tasks=(TaskInfo(name=task, group="imported", num_prompts=len(records)),),
        variants=(Variant(name=name, verifier=str(data["model_id"])),),
        outcomes={name: Outcome(status="measured")},
        points=(measured,),
        provenance=Provenance.collect(),
    )
    return run, records


def _parts(source: str) -> tuple[str, Path]:
    name, equals, path = source.partition("=")
    return (name, Path(path)) if equals and not Path(source).exists() else (Path(source).stem, Path(source))


def _point(data: dict[str, Any]) -> str:
    """Closed loop as far as `max_concurrency` goes; without one the load is the rate of arrivals."""
    if data.get("max_concurrency"):
        return f"c{data['max_concurrency']}"
    rate = data.get("request_rate", "inf")
    return f"c{data['num_prompts']}" if rate in ("inf", None) else f"r{float(rate):g}"


def _record(data: dict[str, Any], number: int, name: str, task: str, point: str) -> RequestRecord:
    gaps, tokens = tuple(data["itls"][number] or ()), int(data["output_lens"][number])
    error = data["errors"][number] or None
    starts = data.get("start_times")
    e2e = float(data["ttfts"][number]) + sum(gaps)
    return RequestRecord(
        variant=name,
        task=task,
        point=point,
        prompt_id=str(number),
        error=error,
        started_s=float(starts[number] - min(starts)) if starts else 0.0,
        ttft_s=None if error else float(data["ttfts"][number]),
        tpot_s=None if error or tokens < 2 else sum(gaps) / (tokens - 1),
        e2e_s=None if error else e2e,
        chunk_gaps_s=gaps,
        prompt_tokens=int(data["input_lens"][number]),
        output_tokens=tokens,
        text=str((data.get("generated_texts") or [""] * (number + 1))[number]),
    )


def _acceptance(data: dict[str, Any]) -> Acceptance | None:
    """From its summary of vLLM's counters; None without speculation."""
    steps, rates = data.get("spec_decode_num_drafts"), data.get("spec_decode_per_position_acceptance_rates")
    if not steps or not rates:
        return None
    at_least = [round(steps * rate) for rate in rates]
    return Acceptance.from_counters(int(steps), int(data["spec_decode_draft_tokens"]), at_least)


def _conditions(data: dict[str, Any], task: str, point: str) -> Conditions:
    """What the file tells; two files' prompts are taken for equal when their lengths in tokens are."""
    lengths = hashlib.sha256(json.dumps(data["input_lens"]).encode()).hexdigest()[:16]
    return Conditions(
        verifier=str(data["model_id"]),
        verifier_revision=_UNKNOWN,
        template_hash=_UNKNOWN,
        prompts={task: lengths},
        max_tokens=0,
        temperature=1.0,  # the file does not tell; at 0 outputs would be audited
        seed=0,
        points=(point,),
        repeats=1,
        enforce_eager=False,
        server_args=(),
        vllm=_UNKNOWN,
        machine=_UNKNOWN,
    )

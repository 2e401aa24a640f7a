"""The JSON of `vllm bench serve --save-result --save-detailed`.

Its requests carry no prompt id: the n-th request of one file and of another are taken for the same prompt, which holds
for equal arguments and seed. The trap: `itl` is the gap between chunks; the time per output token is worked out from
the end-to-end time.
"""

from typing import Any

from bench.imports.foreign import TASK, Foreign
from bench.records import RequestRecord
from speculators.acceptance import Acceptance
from speculators.errors import UserError

TOOL = "vllm bench serve"
WHAT = "a result of `vllm bench serve --save-result --save-detailed`"
_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "errors")


def read(name: str, data: dict[str, Any], path: str) -> Foreign:
    """Read one result.

    Raises:
        UserError: without the lists that `--save-detailed` adds.
    """
    missing = [key for key in (*_LISTS, "model_id", "num_prompts") if key not in data]
    if missing:
        raise UserError(f"{path}: has no {missing[0]!r}, so it is not {WHAT}; measure again with both flags.")
    if len({len(data[key]) for key in _LISTS}) != 1:
        raise UserError(f"{path}: its lists {', '.join(_LISTS)} have unequal lengths; expected {WHAT}.")
    point = _point(data)
    return Foreign(
        tool=TOOL,
        model=str(data["model_id"]),
        records=[_record(data, number, name, point) for number in range(len(data["errors"]))],
        prompts=data["input_lens"],
        wall_s={point: data.get("duration")},
        counters=_acceptance(data),
    )


def _point(data: dict[str, Any]) -> str:
    """Closed loop as far as `max_concurrency` goes; without one the load is the rate of arrivals."""
    if data.get("max_concurrency"):
        return f"c{data['max_concurrency']}"
    rate = data.get("request_rate", "inf")
    return f"c{data['num_prompts']}" if rate in ("inf", None) else f"r{float(rate):g}"


def _record(data: dict[str, Any], number: int, name: str, point: str) -> RequestRecord:
    gaps, tokens = tuple(data["itls"][number] or ()), int(data["output_lens"][number])
    error = data["errors"][number] or None
    starts = data.get("start_times")
    e2e = float(data["ttfts"][number]) + sum(gaps)
    return RequestRecord(
        variant=name,
        task=TASK,
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

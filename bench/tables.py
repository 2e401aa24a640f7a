"""What a report's tables say, as text: the command line, Markdown and HTML show the same rows."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from bench.audit import audit_sentence
from bench.charts import interval_text
from bench.compare import Comparison
from bench.conditions import Variant
from bench.cost import Decision
from bench.report import Report
from bench.summary import Cell, load_name

MARKS = {"better": "▲", "worse": "▼", "equivalent": "≈", "inconclusive": "?"}
TABLE_HEADER = ["task", "variant", "acceptance length", "inter-token latency, ms", "speed-up", "verdict"]
PAIR_HEADER = ["task", "load", "variant", "against", "acceptance ratio", "verdict", "speed-up", "verdict"]
DECISION_HEADER = ["draft", "task", "load", "K", "expected", "why"]
STEP_HEADER = ["variant", "load", "K", "ms a step"]
PARITY_HEADER = ["task", "variant", "predicted", "served", "difference", "prompts"]
PARITY_NOTE = (
    "Predicted by `speculators replay` over the plain verifier's answers, served by vLLM on the same prompts: tokens "
    "per step, bonus token included, over all steps of these prompts. Where a variant's outputs are not equal to the "
    "plain verifier's, the served text leaves the text that the prediction walked."
)


def table_rows(report: Report, point: str | None = None) -> list[list[str]]:
    """Rows of `TABLE_HEADER` at one load (the first): what the command line and Markdown show."""
    rows = []
    for task in report.rows:
        for variant in report.measured:
            if cell := report.cell(task, variant, point):
                speed = cell.speed_up
                rows.append([task, variant, _length(cell), _latency(cell), _ratio(speed), verdict_text(speed)])
    return rows


class PairRow(NamedTuple):
    """Two variants on one task at one load; None where only one of them drafts."""

    task: str
    load: str
    variant: str
    other: str
    length: Comparison | None
    speed: Comparison | None


def pair_comparisons(report: Report) -> list[PairRow]:
    """Every two variants beside the baseline, by task as the other tables."""
    by_key: dict[tuple[str, str, str, str], dict[str, Comparison]] = {}
    for c in report.comparisons:
        if c.task in report.rows:
            by_key.setdefault((c.task, c.point, c.variant, c.reference), {})[c.metric] = c
    return [
        PairRow(task, load_name(point), variant, other, found.get("acceptance_length"), found.get("speed_up"))
        for (task, point, variant, other), found in sorted(
            by_key.items(), key=lambda item: report.rows.index(item[0][0])
        )
    ]


def pair_rows(report: Report) -> list[list[str]]:
    """Rows of `PAIR_HEADER`."""
    return [
        [*row[:4], _ratio(row.length), verdict_text(row.length), _ratio(row.speed), verdict_text(row.speed)]
        for row in pair_comparisons(report)
    ]


def without_load(report: Report, header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The table without its column `load` where that says the same in every row."""
    return (header, rows) if len(report.load_points) > 1 else without(header, rows, "load")


def without(header: list[str], rows: list[list[str]], column: str) -> tuple[list[str], list[list[str]]]:
    """The table without one column."""
    at = header.index(column)
    return header[:at] + header[at + 1 :], [row[:at] + row[at + 1 :] for row in rows]


def decision_rows(report: Report) -> list[list[str]]:
    """Rows of `DECISION_HEADER`."""
    return [
        [d.variant, d.task, load_name(d.point), str(d.best_k or "none"), f"{d.expected_speedup:.2f}×", d.reason]
        for d in report.decision
        if d.task in report.rows
    ]


def step_rows(report: Report) -> list[list[str]]:
    """Rows of `STEP_HEADER`: the cost model."""
    return [
        [s.variant, load_name(s.point), str(s.num_speculative_tokens), f"{s.step_s * 1000:.1f}"]
        for s in report.step_times
    ]


def break_even_sentences(report: Report) -> list[str]:
    """One for each draft that was measured at several concurrencies."""
    return [
        f"{b.variant}, {b.task}: {b.reason}"
        + (
            "."
            if b.concurrency is None
            else f"; from about {b.concurrency:.0f} on speculation costs more than it brings."
        )
        for b in report.break_even
        if b.task in report.rows
    ]


def to_paste(report: Report) -> list[str]:
    """An argument of `vllm serve` for each draft: what to set over all tasks at the first load."""
    variants = {variant.name: variant for variant in report.variants}
    by_batch = {s.variant: s.ranges for s in report.schedule if s.task == report.rows[-1]}
    overall = [d for d in report.decision if (d.task, d.point) == (report.rows[-1], report.load_points[0])]
    return [_paste(d, variants[d.variant], by_batch.get(d.variant, ())) for d in overall if d.best_k]


def _paste(decision: Decision, variant: Variant, by_batch: Sequence[tuple[int, int, int]]) -> str:
    config: dict[str, object] = {"method": variant.algorithm} if variant.algorithm else {}
    config |= {"model": variant.draft} if variant.draft else {}
    config["num_speculative_tokens"] = max([decision.best_k, *(k for _, _, k in by_batch)])
    if by_batch:
        config["num_speculative_tokens_per_batch_size"] = by_batch
    return f"--speculative-config '{json.dumps(config)}'"


def audit_sentences(report: Report) -> list[str]:
    """The audit's verdicts; the load is named where there are several."""
    several = len(report.load_points) > 1
    return [
        (f"At {load_name(audit.point)}, " if several else "") + audit_sentence(audit) for audit in report.losslessness
    ]


def parity_rows(report: Report) -> list[list[str]]:
    """Rows of `PARITY_HEADER`, by task as the other tables."""
    return [
        [
            task,
            parity.variant,
            f"{row.predicted:.2f}",
            f"{row.served:.2f}",
            signed(row.relative_difference),
            str(row.num_prompts) if row.num_prompts == row.num_served else f"{row.num_prompts} of {row.num_served}",
        ]
        for task in report.rows
        for parity in report.parity
        for row in parity.tasks
        if row.task == task
    ]


def condition_rows(report: Report) -> list[tuple[str, str]]:
    """Label and value of what was the same for every variant."""
    c = report.conditions
    unequal = [("UNEQUAL (--force)", difference) for difference in report.forced]
    longest = f"at most {c.max_tokens} tokens, temperature {c.temperature:g}" if c.max_tokens else "length unknown"
    return [
        *unequal,
        ("verifier", f"{c.verifier} (revision {c.verifier_revision})"),
        ("machine", c.machine),
        ("vLLM", f"{c.vllm}, {'eager' if c.enforce_eager else 'compiled'}, {' '.join(c.server_args)}"),
        ("prompts", ", ".join(f"{t.name} {t.num_prompts}" for t in report.tasks) + f", seed {c.seed}"),
        ("requests", f"load {', '.join(map(load_name, report.load_points))}, repeats {c.repeats}, {longest}"),
        *((("thinking", c.thinking),) if c.thinking else ()),
    ]


def variant_row(variant: Variant) -> dict[str, str]:
    """Name, draft and verifier of a variant."""
    details = f"revision {variant.draft_revision}, K = {variant.num_speculative_tokens}"
    draft = f"{variant.draft} ({details})" if variant.draft else variant.algorithm or "none"
    return {"name": variant.name, "draft": draft, "verifier": variant.url or variant.verifier}


def signed(share: float) -> str:
    """`+2.8%`, with a true minus, and none before zero."""
    text = f"{share:+.1%}"
    return "0.0%" if float(text.rstrip("%")) == 0 else text.replace("-", "−")


def verdict_text(value: Comparison | None) -> str:
    """A mark, the verdict, and what stands against believing it."""
    if value is None:
        return "–"
    needs = f" (about {value.prompts_needed:,} prompts would settle it)" if value.prompts_needed else ""
    return f"{MARKS[value.verdict]} {value.verdict}{needs}{' (drift!)' if value.doubtful else ''}"


def _length(cell: Cell) -> str:
    value = cell.acceptance_length
    return f"{value.estimate:.2f} {_brackets(value.low, value.high)}".strip() if value else "–"


def _latency(cell: Cell) -> str:
    value = cell.time_per_token
    return f"{value.estimate * 1000:.1f} {_brackets(value.low, value.high, 1, 1000)}".strip() if value else "–"


def _ratio(value: Comparison | None) -> str:
    return f"{value.estimate:.2f}× {_brackets(value.low, value.high)}".strip() if value else "–"


def _brackets(low: float | None, high: float | None, digits: int = 2, scale: float = 1.0) -> str:
    return "" if low is None else f"[{interval_text(low, high, digits, scale).replace(' to ', ', ')}]"

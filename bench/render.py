"""One `Report` as HTML (a single file that opens from disk without a network), Markdown, CSV and JSON."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from bench.audit import Losslessness
from bench.charts import color_index, interval_text, parity_chart, position_charts, speed_up_chart
from bench.compare import Comparison
from bench.metrics import Spread
from bench.records import BASELINE, Variant
from bench.report import Report
from bench.summary import Cell
from speculators.schema import write_text

HTML_FILE = "report.html"
MARKS = {"better": "▲", "worse": "▼", "equivalent": "≈", "inconclusive": "?"}
_TEMPLATES = Path(__file__).parent / "templates"


def write_report(report: Report, directory: Path) -> Path:
    """Write `report.{html,md,csv,json}` into `directory` and return the path of the HTML."""
    write_text(directory / "report.json", report.model_dump_json(indent=2) + "\n")
    write_text(directory / "report.csv", to_csv(report))
    write_text(directory / "report.md", to_markdown(report))
    write_text(directory / HTML_FILE, to_html(report))
    return directory / HTML_FILE


def to_csv(report: Report) -> str:
    """One row for each task and variant; times in seconds, empty where there is nothing."""
    rows = [_flat(cell) for cell in report.cells]
    output = io.StringIO()
    writer = csv.DictWriter(output, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return output.getvalue()


def _flat(cell: Cell) -> dict[str, Any]:
    m, length, time, speed = cell.metrics, cell.acceptance_length, cell.time_per_token, cell.speed_up
    row: dict[str, Any] = {"task": cell.task, "variant": cell.variant}
    row |= {"requests": m.num_requests, "failed": m.num_failed, "output_tokens": m.output_tokens}
    for name, estimate in (("acceptance_length", length), ("tpot_s_mean", time), ("speed_up", speed)):
        row[name] = estimate.estimate if estimate else None
        row[f"{name}_low"] = estimate.low if estimate else None
        row[f"{name}_high"] = estimate.high if estimate else None
    row["verdict"] = speed.verdict if speed else None
    row["acceptance_length_by_request"] = m.acceptance_length_by_request
    row["acceptance_rate"] = m.acceptance.rate if m.acceptance and m.acceptance.drafted else None
    for name in ("ttft_s", "tpot_s", "chunk_gap_s", "e2e_s"):
        values: Spread | None = getattr(m, name)
        row[f"{name}_p50"] = values.p50 if values else None
        row[f"{name}_p90"] = values.p90 if values else None
    row["output_tokens_per_s"] = m.output_tokens_per_s
    row["marginal"] = " ".join("" if rate is None else f"{rate:.4f}" for rate in cell.marginal)
    return row


def table_rows(report: Report) -> list[list[str]]:
    """Rows of `TABLE_HEADER`: what the command line and Markdown show."""
    rows = []
    for task in report.rows:
        for variant in report.measured:
            if cell := report.cell(task, variant):
                speed = cell.speed_up
                rows.append([task, variant, _length(cell), _latency(cell), _speed(speed), _verdict(speed)])
    return rows


TABLE_HEADER = ["task", "variant", "acceptance length", "inter-token latency, ms", "speed-up", "verdict"]


def _length(cell: Cell) -> str:
    value = cell.acceptance_length
    return f"{value.estimate:.2f} {_brackets(value.low, value.high)}".strip() if value else "–"


def _latency(cell: Cell) -> str:
    value = cell.time_per_token
    return f"{value.estimate * 1000:.1f} {_brackets(value.low, value.high, 1, 1000)}".strip() if value else "–"


def _speed(value: Comparison | None) -> str:
    return f"{value.estimate:.2f}× {_brackets(value.low, value.high)}".strip() if value else "–"


def _verdict(value: Comparison | None) -> str:
    return f"{MARKS[value.verdict]} {value.verdict}" if value else "–"


def _brackets(low: float | None, high: float | None, digits: int = 2, scale: float = 1.0) -> str:
    return "" if low is None else f"[{interval_text(low, high, digits, scale).replace(' to ', ', ')}]"


def to_markdown(report: Report) -> str:
    """The report for a pull request or a terminal."""
    parts = [f"**{report.headline}** {report.detail}".strip(), ""]
    parts += [*_markdown_table(TABLE_HEADER, table_rows(report)), ""]
    parts += [
        "Acceptance length: tokens per verification step, bonus token included. Inter-token latency: time per output "
        "token, (last - first) / (tokens - 1), mean over prompts. Speed-up: geometric mean over the same prompts. "
        f"Brackets: 95% intervals over prompts. Equivalent: within {report.margin:.0%}.",
        "",
    ]
    if positions := [c for c in report.cells if c.task == report.rows[-1] and c.marginal]:
        longest = max(len(c.marginal) for c in positions)
        header = ["accepted at position", *(str(i + 1) for i in range(longest))]
        padded = {c.variant: [*map(_percent, c.marginal), *[""] * (longest - len(c.marginal))] for c in positions}
        lines = [[variant, *rates] for variant, rates in padded.items()]
        parts += [*_markdown_table(header, lines), ""]
    if report.parity:
        parts += ["Predicted and served acceptance length:", ""]
        parts += [*_markdown_table(PARITY_HEADER, parity_rows(report)), "", PARITY_NOTE, ""]
    parts += [f"- {audit_sentence(audit)}" for audit in report.losslessness]
    parts += [f"- {note}" for note in report.notes]
    parts += [f"- Failed {count} times: {what}" for what, count in report.failures.items()]
    parts += ["", "Conditions: " + "; ".join(f"{name}: {value}" for name, value in condition_rows(report)) + ".", ""]
    parts += ["Repeat with:", "", "```", report.provenance.command, "```", ""]
    return "\n".join(parts)


PARITY_HEADER = ["task", "variant", "predicted", "served", "difference", "prompts"]
PARITY_NOTE = (
    "Predicted by `speculators replay` over the plain verifier's answers, served by vLLM on the same prompts: tokens "
    "per step, bonus token included, over all steps of these prompts. Where a variant's outputs are not equal to the "
    "plain verifier's, the served text leaves the text that the prediction walked."
)


def parity_rows(report: Report) -> list[list[str]]:
    """Rows of `PARITY_HEADER`, by task as the other tables."""
    return [
        [
            task,
            parity.variant,
            f"{row.predicted:.2f}",
            f"{row.served:.2f}",
            f"{row.relative_difference:+.1%}",
            str(row.num_prompts) if row.num_prompts == row.num_served else f"{row.num_prompts} of {row.num_served}",
        ]
        for task in report.rows
        for parity in report.parity
        for row in parity.tasks
        if row.task == task
    ]


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.0%}"


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    return [lines[0], "|" + " --- |" * len(header), *lines[1:]]


def audit_sentence(audit: Losslessness) -> str:
    """Says how many greedy outputs are the reference's."""
    unit, at = audit.unit[:-1], audit.first_differences
    share = f"{audit.variant}: {audit.equal} of {audit.compared} outputs equal {audit.reference}'s {unit} for {unit}"
    if not at:
        return share + "."
    return f"{share}; the others first differ at {unit} {at[len(at) // 2] + 1} (median; earliest {at[0] + 1})."


def condition_rows(report: Report) -> list[tuple[str, str]]:
    """Label and value of what was the same for every variant."""
    c = report.conditions
    return [
        ("verifier", f"{c.verifier} (revision {c.verifier_revision})"),
        ("machine", c.machine),
        ("vLLM", f"{c.vllm}, {'eager' if c.enforce_eager else 'compiled'}, {' '.join(c.server_args)}"),
        ("prompts", ", ".join(f"{t.name} {t.num_prompts}" for t in report.tasks) + f", seed {c.seed}"),
        (
            "requests",
            f"concurrency {c.concurrency}, repeats {c.repeats}, at most {c.max_tokens} tokens, "
            f"temperature {c.temperature:g}",
        ),
    ]


def _variant_row(variant: Variant) -> dict[str, str]:
    details = f"revision {variant.draft_revision}, K = {variant.num_speculative_tokens}"
    draft = f"{variant.draft} ({details})" if variant.draft else "none"
    return {"name": variant.name, "draft": draft, "verifier": variant.verifier}


def to_html(report: Report) -> str:
    """The whole page with plotly inside; every text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = {
        "speed_up": speed_up_chart(report),
        "positions": position_charts(report),
        "parity": parity_chart(report),
    }
    page: str = environment.get_template("report.html").render(
        report=report,
        baseline=BASELINE,
        marks=MARKS,
        interval=interval_text,
        color={v.name: color_index(report, v.name) for v in report.variants},
        audits=[(audit, audit_sentence(audit)) for audit in report.losslessness],
        parity_header=PARITY_HEADER,
        parity_rows=parity_rows(report),
        parity_note=PARITY_NOTE.replace("`", ""),
        conditions=condition_rows(report),
        variant_rows=[_variant_row(variant) for variant in report.variants],
        charts_json=json.loads(json.dumps(charts, allow_nan=False)),
        plotly=get_plotlyjs(),
    )
    return page

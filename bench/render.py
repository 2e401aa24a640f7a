"""One `Report` as HTML (a single file that opens from disk without a network), Markdown, CSV and JSON."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from bench.charts import FEW_STEPS, color_index, interval_text, parity_chart, position_charts, speed_up_chart
from bench.load_charts import bucket_charts, load_charts
from bench.metrics import Spread
from bench.report import Report
from bench.summary import Cell, load_name
from bench.tables import (
    DECISION_HEADER,
    MARKS,
    PAIR_HEADER,
    PARITY_HEADER,
    PARITY_NOTE,
    STEP_HEADER,
    TABLE_HEADER,
    audit_sentences,
    break_even_sentences,
    condition_rows,
    decision_rows,
    pair_comparisons,
    pair_rows,
    parity_rows,
    step_rows,
    table_rows,
    to_paste,
    variant_row,
    without,
    without_load,
)
from speculators.schema import write_text

HTML_FILE = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"
_AUDIT_CHIPS = {"identical": "better", "within noise": "better", "near ties": "better", "differs": "worse"}


def write_report(report: Report, directory: Path) -> Path:
    """Write `report.{html,md,csv,json}` into `directory` and return the path of the HTML."""
    write_text(directory / "report.json", report.model_dump_json(indent=2) + "\n")
    write_text(directory / "report.csv", to_csv(report))
    write_text(directory / "report.md", to_markdown(report))
    write_text(directory / HTML_FILE, to_html(report))
    return directory / HTML_FILE


def to_csv(report: Report) -> str:
    """One row for each task, variant and load; times in seconds, empty where there is nothing."""
    rows = [_flat(cell) | {"forced": "; ".join(report.forced)} for cell in report.cells]
    output = io.StringIO()
    writer = csv.DictWriter(output, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return output.getvalue()


def _flat(cell: Cell) -> dict[str, Any]:
    m, length, time, speed = cell.metrics, cell.acceptance_length, cell.time_per_token, cell.speed_up
    row: dict[str, Any] = {"task": cell.task, "variant": cell.variant, "point": cell.point}
    row |= {"requests": m.num_requests, "failed": m.num_failed, "skipped": m.num_skipped}
    row["output_tokens"] = m.output_tokens
    for name, estimate in (("acceptance_length", length), ("tpot_s_mean", time), ("speed_up", speed)):
        row[name] = estimate.estimate if estimate else None
        row[f"{name}_low"] = estimate.low if estimate else None
        row[f"{name}_high"] = estimate.high if estimate else None
    row["verdict"] = speed.verdict if speed else None
    row["doubtful"] = speed.doubtful if speed else None
    row["prompts_needed"] = speed.prompts_needed if speed else None
    row["acceptance_length_by_request"] = m.acceptance_length_by_request
    row["acceptance_rate"] = m.acceptance.rate if m.acceptance and m.acceptance.drafted else None
    for name in ("ttft_s", "tpot_s", "chunk_gap_s", "e2e_s", "user_tokens_per_s"):
        values: Spread | None = getattr(m, name)
        for quantile in ("p50", "p90", "p99"):
            row[f"{name}_{quantile}"] = getattr(values, quantile) if values else None
    row["output_tokens_per_s"] = m.output_tokens_per_s
    row["total_tokens_per_s"] = m.total_tokens_per_s
    row["marginal"] = " ".join("" if rate is None else f"{rate:.4f}" for rate in cell.marginal)
    return row


def to_markdown(report: Report) -> str:
    """The report for a pull request or a terminal."""
    parts = [f"**{report.headline}** {report.detail}".strip(), ""]
    parts += [f"**{_upper(difference)}** (compared all the same with --force)\n" for difference in report.forced]
    for point in report.load_points:
        parts += [f"At {load_name(point)}:", ""] if len(report.load_points) > 1 else []
        parts += [*_markdown_table(TABLE_HEADER, table_rows(report, point)), ""]
    parts += [
        "Acceptance length: tokens per verification step, bonus token included. Inter-token latency: time per output "
        "token, (last - first) / (tokens - 1), mean over prompts. Speed-up: geometric mean over the same prompts. "
        f"Brackets: 95% intervals over prompts. Equivalent: within {report.margin:.0%}.",
        "",
    ]
    if pairs := pair_rows(report):
        table = _markdown_table(*without_load(report, PAIR_HEADER, pairs))
        parts += ["Variants with each other, on the same prompts:", "", *table, ""]
    if rows := decision_rows(report):
        table = _markdown_table(*without_load(report, DECISION_HEADER, rows))
        parts += ["What to set (K: `num_speculative_tokens`):", "", *table, ""]
        parts += [f"- {sentence}" for sentence in break_even_sentences(report)]
        parts += [f"- `{argument}`" for argument in to_paste(report)]
        parts += [""]
    if len(steps := step_rows(report)) > 1:
        parts += ["Time of a verification step, over all tasks:", ""]
        parts += [*_markdown_table(*without_load(report, STEP_HEADER, steps)), ""]
    if positions := [c for v in report.measured if (c := report.cell(report.rows[-1], v)) and c.marginal]:
        longest = max(len(c.marginal) for c in positions)
        header = ["accepted at position", *(str(i + 1) for i in range(longest))]
        padded = {c.variant: [*map(_percent, c.marginal), *[""] * (longest - len(c.marginal))] for c in positions}
        lines = [[variant, *rates] for variant, rates in padded.items()]
        parts += [*_markdown_table(header, lines), ""]
    if report.parity:
        parts += ["Predicted and served acceptance length:", ""]
        parts += [*_markdown_table(PARITY_HEADER, parity_rows(report)), "", PARITY_NOTE, ""]
    parts += [f"- {sentence}" for sentence in audit_sentences(report)]
    parts += [f"- {note}" for note in report.notes]
    parts += [f"- Failed {count} times: {what}" for what, count in report.failures.items()]
    parts += ["", "Conditions: " + "; ".join(f"{name}: {value}" for name, value in condition_rows(report)) + ".", ""]
    parts += ["Repeat with:", "", "```", *report.commands, "```", ""] if report.commands else []
    return "\n".join(parts)


def _upper(difference: str) -> str:
    return f"UNEQUAL CONDITIONS: {difference}"


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.0%}"


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    return [lines[0], "|" + " --- |" * len(header), *lines[1:]]


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
        "speed_up": {point: chart for point in report.load_points if (chart := speed_up_chart(report, point))},
        "positions": position_charts(report),
        "buckets": bucket_charts(report),
        "load": load_charts(report),
        "parity": parity_chart(report),
    }
    set_rows = decision_rows(report)
    page: str = environment.get_template("report.html").render(
        report=report,
        drafting=[v for v in report.measured if any(c.acceptance_length for c in report.cells if c.variant == v)],
        load_name=load_name,
        marks=MARKS,
        interval=interval_text,
        color={v.name: color_index(report, v.name) for v in report.variants},
        audits=list(zip(report.losslessness, audit_sentences(report), strict=True)),
        audit_chips=_AUDIT_CHIPS,
        few_steps=FEW_STEPS,
        pairs=pair_comparisons(report),
        decisions=without_load(report, DECISION_HEADER, [row for row in set_rows if row[1] != report.rows[-1]]),
        overall=without_load(
            report, *without(DECISION_HEADER, [row for row in set_rows if row[1] == report.rows[-1]], "task")
        ),
        steps=without_load(report, STEP_HEADER, step_rows(report)),
        break_evens=break_even_sentences(report),
        to_paste=to_paste(report),
        parity_header=PARITY_HEADER,
        parity_rows=parity_rows(report),
        parity_note=PARITY_NOTE.replace("`", ""),
        conditions=condition_rows(report),
        variant_rows=[variant_row(variant) for variant in report.variants],
        charts_json=json.loads(json.dumps(charts, allow_nan=False)),
        plotly=get_plotlyjs(),
    )
    return page

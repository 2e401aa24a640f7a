"""The report's charts as plotly figures (plain JSON). `meta.color` is an index into the colours of the page's theme."""

from collections.abc import Sequence
from typing import Any

from bench.compare import ALL_TASKS, Comparison
from bench.report import Report
from bench.summary import Cell

Figure = dict[str, Any]

# Shape and dash differ too: colour alone tells nothing in print or to a colour-blind reader.
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_ROW_SHARE = 0.66
FEW_STEPS = 20  # a share or mean of fewer steps says more about one prompt than about the position
_TICKS = (0.1, 0.2, 0.5, 1.0, 2.0)


def color_index(report: Report, variant: str) -> int:
    """0 for the baseline, then 1, 2, ... in the order of the run."""
    return [v.name for v in report.variants].index(variant)


def speed_up_chart(report: Report, load: str | None = None) -> Figure | None:
    """Speed-up over the plain verifier at a load (the first): a row a task, a point with its 95 % interval a variant;
    None without any."""
    load = load or report.load_points[0]
    compared = {(c.task, c.variant): c.speed_up for c in report.cells if c.point == load and c.speed_up}
    variants = [name for name in report.measured if any(name == variant for _, variant in compared)]
    found = {task for task, _ in compared}
    rows = [row for row in reversed((*report.rows[-1:], *report.rows[:-1])) if row in found]
    if not rows:
        return None
    traces = [_speed_up_trace(report, rows, variants, variant, compared) for variant in variants]
    band = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": 1 / (1 + report.margin), "x1": 1 + report.margin}
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1}
    layout = {
        "height": 110 + len(rows) * max(46, 19 * len(variants)),
        "xaxis": {"title": {"text": "speed-up (plain verifier = 1)"}, "ticksuffix": "×"},
        "yaxis": {
            "tickvals": list(range(len(rows))),
            "ticktext": [f"<b>{row}</b>" if row == ALL_TASKS else row for row in rows],
            "range": [-0.6, len(rows) - 0.4],
            "showgrid": False,
            "zeroline": False,
        },
        "annotations": [
            {"text": "plain verifier", "x": 1, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        ],
        "shapes": [{**band, "layer": "below", "name": "band"}, {**line, "layer": "below", "name": "reference"}],
    }
    return {"data": traces, "layout": layout}


def _speed_up_trace(
    report: Report,
    rows: Sequence[str],
    variants: Sequence[str],
    variant: str,
    compared: dict[tuple[str, str], Comparison],
) -> Figure:
    place = variants.index(variant)
    shift = ((len(variants) - 1) / 2 - place) * _ROW_SHARE / max(1, len(variants))
    cells = [(y, c) for y, row in enumerate(rows) if (c := compared.get((row, variant)))]
    color = color_index(report, variant)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": variant,
        "meta": {"color": color},
        "x": [c.estimate for _, c in cells],
        "y": [y + shift for y, _ in cells],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [(c.high or c.estimate) - c.estimate for _, c in cells],
            "arrayminus": [c.estimate - (c.low or c.estimate) for _, c in cells],
            "thickness": 2,
            "width": 4,
        },
        "marker": {"size": 10, "symbol": _SYMBOLS[(color - 1) % len(_SYMBOLS)]},
        "text": [f"{c.task}: {c.estimate:.2f}× ({interval_text(c.low, c.high)}), {c.verdict}" for _, c in cells],
        "hovertemplate": "%{text}<extra>" + variant.replace("%", "") + "</extra>",
    }


def position_charts(report: Report) -> dict[str, dict[str, Figure]]:
    """Acceptance by position: {"marginal": {task: figure}, "conditional": {...}}; tasks without steps are left out."""
    charts: dict[str, dict[str, Figure]] = {}
    for kind, title in (
        ("marginal", "share of all steps"),
        ("conditional", "share of steps that got this far"),
    ):
        figures = {}
        for row in reversed(report.rows):
            cells = [c for v in report.measured if (c := report.cell(row, v)) and c.marginal]
            if cells:
                figures[row] = _position_figure(report, cells, kind, title)
        charts[kind] = figures
    return charts


def _position_figure(report: Report, cells: Sequence[Cell], kind: str, title: str) -> Figure:
    traces = [
        line_trace(report, cell.variant, list(enumerate(rates, start=1)), "position %{x}: %{y:.1%}")
        for cell in cells
        if (rates := cell.marginal if kind == "marginal" else _settled(cell))
    ]
    longest = max(len(cell.marginal) for cell in cells)
    layout = {
        "height": 320,
        "xaxis": {"title": {"text": "draft position"}, "dtick": 1, "range": [0.7, longest + 0.3], "zeroline": False},
        "yaxis": {"title": {"text": title}, "tickformat": ".0%", "range": [0, 1.02], "zeroline": False},
    }
    return {"data": traces, "layout": layout}


def _settled(cell: Cell) -> tuple[float | None, ...]:
    """The conditional rates as far as `FEW_STEPS` steps came."""
    counts = cell.metrics.acceptance.histogram if cell.metrics.acceptance else ()
    return tuple(rate for i, rate in enumerate(cell.conditional) if sum(counts[i:]) >= FEW_STEPS)


def line_trace(report: Report, variant: str, points: Sequence[tuple[float, float | None]], hover: str) -> Figure:
    """A variant's line through points (x, y) in its colour, dash and symbol."""
    color = color_index(report, variant)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": variant,
        "meta": {"color": color},
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"dash": _DASHES[(color - 1) % len(_DASHES)], "width": 2},
        "marker": {"size": 8, "symbol": _SYMBOLS[(color - 1) % len(_SYMBOLS)]},
        "hovertemplate": hover + "<extra>" + variant.replace("%", "") + "</extra>",
    }


def parity_chart(report: Report) -> Figure | None:
    """Predicted against served acceptance length: a point a prompt, a colour a variant; None without a prediction."""
    if not report.parity:
        return None
    traces = []
    for parity in report.parity:
        color = color_index(report, parity.variant)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": parity.variant,
                "meta": {"color": color},
                "x": [prompt.predicted for prompt in parity.prompts],
                "y": [prompt.served for prompt in parity.prompts],
                "text": [f"{prompt.task} {prompt.prompt_id}" for prompt in parity.prompts],
                "marker": {"size": 8, "opacity": 0.75, "symbol": _SYMBOLS[(color - 1) % len(_SYMBOLS)]},
                "hovertemplate": "%{text}: predicted %{x:.2f}, served %{y:.2f}<extra>"
                + parity.variant.replace("%", "")
                + "</extra>",
            }
        )
    prompts = [prompt for parity in report.parity for prompt in parity.prompts]
    low, high = _parity_range([length for prompt in prompts for length in (prompt.predicted, prompt.served)])
    tick = next((step for step in _TICKS if (high - low) / step <= 6), _TICKS[-1])
    axis = {"range": [low, high], "dtick": tick, "tickformat": ".1f"}
    layout = {
        "height": 380,
        "xaxis": {**axis, "title": {"text": "predicted acceptance length"}, "constrain": "domain"},
        "yaxis": {**axis, "title": {"text": "served acceptance length"}, "scaleanchor": "x", "constrain": "domain"},
        "shapes": [
            {"type": "line", "x0": low, "y0": low, "x1": high, "y1": high, "layer": "below", "name": "reference"}
        ],
    }
    return {"data": traces, "layout": layout}


def _parity_range(lengths: Sequence[float]) -> tuple[float, float]:
    """Both axes from the least to the greatest length, with some air around."""
    air = max(0.1, 0.06 * (max(lengths) - min(lengths)))
    return min(lengths) - air, max(lengths) + air


def interval_text(low: float | None, high: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """`1.18 to 1.30`, or a dash where there is no interval."""
    return "no interval" if low is None or high is None else f"{low * scale:.{digits}f} to {high * scale:.{digits}f}"

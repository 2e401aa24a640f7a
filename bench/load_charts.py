"""Charts over load, output position and context length, as plotly figures (see `bench.charts`)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.buckets import Bucket
from bench.charts import FEW_STEPS, Figure, line_trace
from bench.report import Report
from bench.summary import Cell

_LOADS = {"c": ("", "requests in flight"), "r": ("-at-rate", "requests arriving a second")}


class Drawn(NamedTuple):
    """A point of a line, with its 95 % interval where it has one."""

    estimate: float
    low: float | None = None
    high: float | None = None


def load_charts(report: Report) -> dict[str, Figure]:
    """Time per token and total throughput against concurrency, and against the rate of arrivals, over all tasks; a kind
    of load with fewer than two points has none."""
    shown = {"tpot": ("ms per output token", _latency), "total": ("output tokens/s, all users", _throughput)}
    charts = {}
    for kind, (suffix, load_title) in _LOADS.items():
        points = sorted((p for p in report.load_points if p.startswith(kind)), key=lambda p: float(p[1:]))
        for name, (title, value) in shown.items() if len(points) > 1 else ():
            traces = [trace for v in report.measured if (trace := _load_trace(report, v, points, value))]
            if traces:
                ticks = [float(p[1:]) for p in points]
                axis = {"title": {"text": load_title}, "type": "log", "tickvals": ticks}
                charts[name + suffix] = _figure(traces, axis | {"ticktext": [f"{tick:g}" for tick in ticks]}, title)
    return charts


def _latency(cell: Cell) -> Drawn | None:
    time = cell.time_per_token
    if time is None:
        return None
    low, high = (None if end is None else end * 1000 for end in (time.low, time.high))
    return Drawn(time.estimate * 1000, low, high)


def _throughput(cell: Cell) -> Drawn | None:
    return Drawn(cell.metrics.total_tokens_per_s) if cell.metrics.total_tokens_per_s else None


def _load_trace(
    report: Report, variant: str, points: Sequence[str], value: Callable[[Cell], Drawn | None]
) -> Figure | None:
    """One variant's line with its intervals; None where it has no point."""
    cells = [(float(p[1:]), c) for p in points if (c := report.cell(report.rows[-1], variant, p))]
    drawn = [(x, found) for x, c in cells if (found := value(c))]
    if not drawn:
        return None
    trace = line_trace(report, variant, [(x, d.estimate) for x, d in drawn], "load %{x}: %{y:.1f}")
    ends = [(d.estimate, d.low, d.high) for _, d in drawn]
    trace["error_y"] = {
        "type": "data",
        "symmetric": False,
        "array": [0 if high is None else high - y for y, _, high in ends],
        "arrayminus": [0 if low is None else y - low for y, low, _ in ends],
        "thickness": 1.5,
        "width": 3,
    }
    return trace


def bucket_charts(report: Report) -> dict[str, dict[str, Figure]]:
    """Acceptance length {"output": {task: figure}, "context": {...}} at the first load."""
    return {
        "output": _by_task(report, lambda c: c.by_output_position, "output tokens before the step"),
        "context": _by_task(report, lambda c: c.by_context_length, "context length before the step"),
    }


def _by_task(report: Report, buckets: Callable[[Cell], Sequence[Bucket]], title: str) -> dict[str, Figure]:
    figures = {}
    for row in reversed(report.rows):
        cells = [c for v in report.measured if (c := report.cell(row, v))]
        kept = {c.variant: [b for b in buckets(c) if b.steps >= FEW_STEPS] for c in cells}
        names = {b.low: _range(b) for found in kept.values() for b in found}
        order = sorted(names)
        traces = [
            line_trace(
                report, variant, [(order.index(b.low), b.acceptance_length) for b in found], "%{y:.2f} tokens a step"
            )
            for variant, found in kept.items()
            if found
        ]
        if traces:
            axis = {"title": {"text": title}, "tickvals": list(range(len(order)))}
            figures[row] = _figure(traces, axis | {"ticktext": [names[low] for low in order]}, "acceptance length")
    return figures


def _range(bucket: Bucket) -> str:
    return f"{bucket.low}+" if bucket.high is None else f"{bucket.low}–{bucket.high - 1}"


def _figure(traces: list[Figure], x_axis: Figure, title: str) -> Figure:
    layout = {"height": 320, "xaxis": x_axis, "yaxis": {"title": {"text": title}, "rangemode": "normal"}}
    return {"data": traces, "layout": layout}

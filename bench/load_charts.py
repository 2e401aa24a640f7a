"""Charts over load, output position and context length, as plotly figures (see `bench.charts`)."""

from collections.abc import Callable, Sequence

from bench.buckets import Bucket
from bench.charts import Figure, line_trace
from bench.report import Report
from bench.summary import Cell

_FEW_STEPS = 20  # a bucket of fewer steps says more about one prompt than about the position


def load_charts(report: Report) -> dict[str, Figure]:
    """Time per token and total throughput against concurrency, over all tasks; empty with fewer than two."""
    points = sorted((p for p in report.load_points if p.startswith("c")), key=lambda p: float(p[1:]))
    if len(points) < 2:
        return {}
    shown: dict[str, tuple[str, Callable[[Cell], float | None]]] = {
        "tpot": ("ms per output token", lambda c: c.time_per_token.estimate * 1000 if c.time_per_token else None),
        "total": ("output tokens/s, all users", lambda c: c.metrics.total_tokens_per_s),
    }
    charts = {}
    for name, (title, value) in shown.items():
        traces = []
        for variant in report.measured:
            cells = [(p, c) for p in points if (c := report.cell(report.rows[-1], variant, p))]
            drawn = [(float(p[1:]), number) for p, c in cells if (number := value(c)) is not None]
            if drawn:
                traces.append(line_trace(report, variant, drawn, "%{x} in flight: %{y:.1f}"))
        if traces:
            ticks = [float(p[1:]) for p in points]
            axis = {"title": {"text": "requests in flight"}, "type": "log", "tickvals": ticks}
            charts[name] = _figure(traces, axis | {"ticktext": [f"{tick:g}" for tick in ticks]}, title)
    return charts


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
        kept = {c.variant: [b for b in buckets(c) if b.steps >= _FEW_STEPS] for c in cells}
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

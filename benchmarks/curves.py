"""Learning curves on disk, their comparison at equal seconds and at equal tokens, and their plot. No torch."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from training_job import Algorithm

from speculators.provenance import Provenance
from speculators.schema import Strict, write_text

Axis = Literal["seconds", "tokens"]
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


class CurvePoint(Strict):
    """A checkpoint: real tokens and seconds of optimizer steps until it was saved, and its acceptance length."""

    step: int
    tokens: int
    seconds: float
    acceptance_length: float


class Curve(Strict):
    """One run of one candidate."""

    candidate: str
    algorithm: Algorithm
    seed: int
    steps: int
    points: tuple[CurvePoint, ...]


class Curves(Strict):
    """Everything measured so far."""

    provenance: Provenance
    curves: tuple[Curve, ...]


class Standing(NamedTuple):
    """A candidate's acceptance lengths, one a seed, at the same seconds or tokens as all others of its algorithm."""

    candidate: str
    algorithm: Algorithm
    at: float
    lengths: tuple[float, ...]

    @property
    def median(self) -> float:
        """Over seeds."""
        return statistics.median(self.lengths)


def standings(curves: Sequence[Curve], axis: Axis) -> list[Standing]:
    """All candidates of each algorithm where the shortest of its curves ends, best first.

    Between two checkpoints the length is interpolated; before the first one it rises from 1, a draft
    that gets nothing accepted.
    """
    found = []
    for algorithm in dict.fromkeys(curve.algorithm for curve in curves):
        own = [curve for curve in curves if curve.algorithm == algorithm]
        at = min(getattr(curve.points[-1], axis) for curve in own)
        names = dict.fromkeys(curve.candidate for curve in own)
        of_algorithm = [
            Standing(name, algorithm, at, tuple(length_at(c, axis, at) for c in own if c.candidate == name))
            for name in names
        ]
        found += sorted(of_algorithm, key=lambda standing: -standing.median)
    return found


def length_at(curve: Curve, axis: Axis, at: float) -> float:
    """The curve's acceptance length at `at` seconds or tokens."""
    x = [0.0, *(float(getattr(point, axis)) for point in curve.points)]
    y = [1.0, *(point.acceptance_length for point in curve.points)]
    return float(np.interp(at, x, y))


def plot(curves: Sequence[Curve], path: Path) -> None:
    """A row of panels an algorithm: against tokens and against seconds; a line a seed, a colour a candidate."""
    from plotly.subplots import make_subplots

    algorithms = list(dict.fromkeys(curve.algorithm for curve in curves))
    axes: tuple[Axis, Axis] = ("tokens", "seconds")
    titles = [f"{algorithm}, by {axis}" for algorithm in algorithms for axis in axes]
    figure = make_subplots(rows=len(algorithms), cols=2, subplot_titles=titles)
    names = list(dict.fromkeys(curve.candidate for curve in curves))
    shown: set[str] = set()
    for curve in curves:
        for column, axis in enumerate(axes, start=1):
            figure.add_scatter(
                x=[getattr(point, axis) for point in curve.points],
                y=[point.acceptance_length for point in curve.points],
                mode="lines+markers",
                name=curve.candidate,
                legendgroup=curve.candidate,
                showlegend=curve.candidate not in shown,
                line={"color": _COLORS[names.index(curve.candidate) % len(_COLORS)]},
                hovertext=f"seed {curve.seed}",
                row=algorithms.index(curve.algorithm) + 1,
                col=column,
            )
            figure.update_xaxes(title_text=axis, row=algorithms.index(curve.algorithm) + 1, col=column)
            shown.add(curve.candidate)
    figure.update_yaxes(title_text="acceptance length (replay)")
    figure.update_layout(height=120 + 420 * len(algorithms), template="plotly_white")
    write_text(path, figure.to_html(include_plotlyjs=True))


def lines(standing: Iterable[Standing], axis: Axis) -> list[str]:
    """As printed: candidate, median over seeds, least and most."""
    unit = "s" if axis == "seconds" else "tokens"
    return [
        f"  {s.algorithm} at {s.at:,.0f} {unit}  {s.candidate:28s} {s.median:.3f} "
        f"({min(s.lengths):.3f} to {max(s.lengths):.3f}, {len(s.lengths)} seeds)"
        for s in standing
    ]

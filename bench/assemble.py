"""The parts of a report, from the rows of a run: cells, comparisons of two variants, drift, audits, parity."""

from collections.abc import Sequence

from bench.answers import PREDICTED_DIRECTORY, read_predictions
from bench.audit import Losslessness, audited_against, losslessness
from bench.buckets import by_context_length, by_output_position
from bench.compare import (
    ALL_TASKS,
    Comparison,
    Drift,
    Estimate,
    acceptance_length,
    acceptance_ratios,
    drift,
    speed_ups,
    time_per_token,
)
from bench.conditions import CLOSING_PASS, Point, Variant
from bench.margins import read_margins
from bench.merge import Loaded
from bench.metrics import PointMetrics, summarise
from bench.parity import Parity, parity
from bench.records import RequestRecord
from bench.summary import Cell
from speculators.acceptance import Acceptance


class Rows:
    """The records by variant, load and pass; opening passes unless asked otherwise."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.run = loaded, loaded.run
        self._rows: dict[tuple[str, str, int], list[RequestRecord]] = {}
        for record in loaded.records:
            self._rows.setdefault((record.variant, record.point, record.pass_index), []).append(record)
        seen = {point for _, point, _ in self._rows}
        asked = [point for point in self.run.conditions.points if point in seen]
        self.points = (*asked, *sorted(seen - set(asked)))
        self.tasks = [task.name for task in self.run.tasks]

    def of(self, variant: str, point: str, pass_index: int = 0) -> list[RequestRecord]:
        """A variant's records at a load."""
        return self._rows.get((variant, point, pass_index), [])

    def reference(self, variant: str) -> str | None:
        """The baseline that a variant is compared with; None for a baseline."""
        return self.loaded.references.get(variant)

    @property
    def others(self) -> list[Variant]:
        """All variants but the baselines."""
        return [v for v in self.run.variants if self.reference(v.name)]


def cells_of(variant: str, point: str, rows: Rows, margin: float, doubtful: set[tuple[str, str]]) -> list[Cell]:
    """A variant's cells at one load: by task, then over all of them."""
    mine = rows.of(variant, point)
    reference = rows.reference(variant)
    compared = {}
    if reference:
        unsure = (reference, point) in doubtful
        found = speed_ups(mine, rows.of(reference, point), rows.tasks, margin)
        compared = {c.task: c.model_copy(update={"doubtful": unsure}) for c in found}
    cells = []
    for task in [*rows.tasks, ALL_TASKS]:
        records = mine if task == ALL_TASKS else [record for record in mine if record.task == task]
        if not records:
            continue
        points = [
            p
            for p in rows.run.points
            if (p.variant, p.point, p.pass_index) == (variant, point, 0) and task in (p.task, ALL_TASKS)
            if not p.refused
        ]
        metrics = summarise(records, _counters(points), _wall_s(points))
        rates = metrics.acceptance if metrics.acceptance and metrics.acceptance.steps else None
        cells.append(
            Cell(
                task=task,
                variant=variant,
                point=point,
                metrics=metrics,
                acceptance_length=acceptance_length(records, task, variant) or _from_counters(metrics, task, variant),
                time_per_token=time_per_token(records, task, variant),
                speed_up=compared.get(task),
                marginal=_numbers(rates.marginal) if rates else (),
                conditional=_numbers(rates.conditional) if rates else (),
                by_output_position=by_output_position(records),
                by_context_length=by_context_length(records),
            )
        )
    return cells


def pairs(rows: Rows, margin: float, doubtful: set[tuple[str, str]]) -> list[Comparison]:
    """Every two variants of the list with each other, at each load: acceptance where both draft, and latency."""
    found = []
    for number, second in enumerate(rows.others):
        for first in rows.others[:number]:
            for point in rows.points:
                mine, other = rows.of(first.name, point), rows.of(second.name, point)
                unsure = bool({(rows.reference(v.name), point) for v in (first, second)} & doubtful)
                found += acceptance_ratios(mine, other, rows.tasks, margin)
                latencies = speed_ups(mine, other, rows.tasks, margin)
                found += [c.model_copy(update={"doubtful": unsure}) for c in latencies]
    return found


def _numbers(rates: Sequence[float]) -> tuple[float | None, ...]:
    """nan (no step came that far) as None, which JSON can hold."""
    return tuple(None if rate != rate else rate for rate in rates)


def _counters(points: Sequence[Point]) -> Acceptance | None:
    parts = [point.counters for point in points if point.counters]
    return sum(parts[1:], parts[0]) if parts else None


def _wall_s(points: Sequence[Point]) -> float | None:
    times = [point.wall_s for point in points]
    return sum(time for time in times if time) if times and all(times) else None


def _from_counters(metrics: PointMetrics, task: str, variant: str) -> Estimate | None:
    """Without per-request metrics there is a number but no interval."""
    if not metrics.acceptance or not metrics.acceptance.steps:
        return None
    return Estimate(
        metric="acceptance_length",
        task=task,
        variant=variant,
        estimate=metrics.acceptance.length,
        low=None,
        high=None,
        num_prompts=metrics.num_requests,
    )


def drifts_of(rows: Rows) -> list[Drift]:
    """Drift of every baseline that was measured again at the end, at each load."""
    baselines = dict.fromkeys(rows.loaded.references.values())
    pairs = [(rows.of(b, p, CLOSING_PASS), rows.of(b, p)) for b in baselines for p in rows.points]
    return [found for closing, opening in pairs if (found := drift(closing, opening))]


def plain_of(rows: Rows) -> dict[str, str]:
    """Each variant's plain server with the same weights: drafts on FP8 have `fp8`, if that was measured."""
    plain = dict(rows.loaded.references)
    for variant in rows.others:
        same = [
            v.name
            for v in rows.others
            if v.fp8 and not v.speculates and rows.reference(v.name) == rows.reference(variant.name)
        ]
        if variant.fp8 and variant.speculates and same and any(r.ok for p in rows.points for r in rows.of(same[0], p)):
            plain[variant.name] = same[0]
    return plain


def audits_of(rows: Rows) -> tuple[list[Losslessness], list[str]]:
    """Every variant against the plain server with its weights, at each load; why one was left out."""
    margins = {k: m for path, names in rows.loaded.sources.items() for k, m in read_margins(path, names).items()}
    audits, texts = [], []
    for variant in rows.others:
        baseline = rows.loaded.references[variant.name]
        mine = [v for v in rows.run.variants if rows.reference(v.name) == baseline]
        plain = audited_against(variant, mine, baseline)
        if plain is None:
            if any(rows.of(variant.name, point) for point in rows.points):
                text = "its outputs are audited against the plain FP8 verifier alone; compare fp8 as well"
                texts.append(f"{variant.name} has no losslessness audit: {text}.")
            continue
        for point in rows.points:
            opening, closing = rows.of(plain, point), rows.of(plain, point, CLOSING_PASS)
            same_weights = variant.speculates or not variant.fp8
            audit = losslessness(rows.of(variant.name, point), opening, closing, margins, same_weights)
            if audit:
                audits.append(audit)
    return audits, texts


def parities_of(rows: Rows) -> tuple[list[Parity], list[str]]:
    """Predictions beside what was served at the first load, in the order of the variants; why a file was left out."""
    found, texts = [], []
    for directory, here in rows.loaded.sources.items():
        there = {name: old for old, name in here.items()}
        variants = [v.model_copy(update={"name": there[v.name]}) for v in rows.run.variants if v.name in there]
        predictions, strangers = read_predictions(directory, variants)
        texts += [
            f"{PREDICTED_DIRECTORY}/{name} is left out: no variant of this run is called so." for name in strangers
        ]
        for variant in variants:
            prediction = predictions.get(variant.name)
            if prediction is None:
                continue
            name, temperature = here[variant.name], rows.run.conditions.temperature
            walked, served = prediction.total.num_speculative_tokens, variant.num_speculative_tokens
            made = parity(prediction, rows.of(name, rows.points[0]), rows.tasks)
            left_out = f"The prediction for {name} is left out: "
            if temperature > 0:
                texts.append(f"{left_out}it is about greedy answers, and temperature {temperature:g} was served.")
            elif served is not None and walked != served:
                texts.append(f"{left_out}it is for K = {walked}, and K = {served} was served.")
            elif made is None:
                texts.append(f"{left_out}it has no prompt in common with what was served.")
            else:
                found.append(made)
    return found, texts

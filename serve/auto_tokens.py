"""`--num-speculative-tokens auto`: the K that a bench report says is fastest for this draft and verifier.

The trap: what a chain draft (eagle3) accepts at a smaller K can be read off a longer run, what a block draft accepts
cannot, since a smaller K shows it fewer mask tokens; so for these only a measured K is chosen.
"""

from pathlib import Path
from typing import NamedTuple

from pydantic import ConfigDict

from speculators.acceptance import Acceptance
from speculators.algorithms.draft_config import DraftConfig
from speculators.checkpoint import CHECKPOINTS
from speculators.errors import UserError
from speculators.schema import Strict, read_json
from speculators.verifier import weights_revision

REPORT_FILE = "report.json"
ALL_TASKS = "all tasks"
_CHAINS = frozenset({"eagle3"})


class Choice(NamedTuple):
    """K, and the sentence that says why."""

    num_speculative_tokens: int
    reason: str


class _Part(Strict):
    """A part of a report that says more than is read here."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class _Mean(_Part):
    mean: float


class _Metrics(_Part):
    acceptance: Acceptance | None = None
    tpot_s: _Mean | None = None


class _Cell(_Part):
    task: str
    variant: str
    point: str = "c1"
    metrics: _Metrics


class _Variant(_Part):
    name: str
    verifier: str
    draft: str | None = None
    draft_revision: str | None = None
    algorithm: str | None = None
    num_speculative_tokens: int | None = None


class _Report(_Part):
    variants: tuple[_Variant, ...]
    cells: tuple[_Cell, ...]

    def metrics(self, variant: _Variant) -> _Metrics | None:
        """Over all tasks at the first load point; with one task a report holds that one alone."""
        mine = [cell for cell in self.cells if (cell.variant, cell.point) == (variant.name, self.cells[0].point)]
        overall = [cell for cell in mine if cell.task == ALL_TASKS] or (mine if len(mine) == 1 else [])
        return overall[0].metrics if overall else None


class _Measured(NamedTuple):
    """A variant with this draft: K, seconds a token, and what was accepted."""

    tokens: int
    tpot_s: float
    acceptance: Acceptance

    @property
    def step_s(self) -> float:
        """Seconds of one draft-and-verify step."""
        return self.tpot_s * self.acceptance.length


def choose(directory: Path, config: DraftConfig, verifier: str, report: Path | None = None) -> Choice:
    """K for the draft in `directory` served with `verifier`.

    Args:
        report: a report.json or a bench run's directory; None looks for `bench/` in the draft's run and beside it.

    Raises:
        UserError: `report` names none, or one that cannot be read or is not about this draft and verifier.
    """
    trained = config.num_speculative_tokens
    file = _find(directory, report)
    if file is None:
        return Choice(trained, f"as trained: no bench report beside {_run_of(directory)}")
    found = read_json(file, _Report, "a bench report")
    measured, plain_s = _of_draft(found, directory, verifier)
    if not measured:
        if report is not None:
            raise UserError(
                f"--report: {file} has no measurement of {directory} (these weights) with {verifier}; give another, or "
                "measure it with `speculators bench`."
            )
        return Choice(trained, f"as trained: {file} has no measurement of these weights with this verifier")
    if config.algorithm in _CHAINS:
        return _from_chain(measured, plain_s, file)
    best = min(measured, key=lambda m: m.tpot_s)
    others = ", ".join(str(m.tokens) for m in measured if m is not best)
    told = f"fastest of K = {others} and {best.tokens}" if others else "the only K measured"
    return Choice(best.tokens, f"{told}, {best.tpot_s * 1000:.1f} ms a token in {file}")


def _from_chain(measured: list[_Measured], plain_s: float | None, file: Path) -> Choice:
    """Step time is a line in K, through the measured points (with one of these, through the plain verifier at K = 0);
    tokens a step are the longest run's marginal rates summed up to K."""
    import numpy as np

    points = [(m.tokens, m.step_s) for m in measured]
    if len({tokens for tokens, _ in points}) < 2:
        if plain_s is None:
            return Choice(measured[0].tokens, f"the only K measured in {file}")
        points.append((0, plain_s))
    slope, start = np.polyfit([k for k, _ in points], [seconds for _, seconds in points], deg=1)
    longest = max(measured, key=lambda m: m.tokens)
    lengths = 1 + np.cumsum(longest.acceptance.marginal)
    seconds = [(start + slope * k) / lengths[k - 1] for k in range(1, len(lengths) + 1)]
    best = int(np.argmin(seconds)) + 1
    return Choice(
        best,
        f"acceptance length {lengths[best - 1]:.2f} and {(start + slope * best) * 1000:.1f} ms a step, so "
        f"{seconds[best - 1] * 1000:.1f} ms a token, the least for K = 1 to {len(lengths)} by {file}",
    )


def _of_draft(report: _Report, directory: Path, verifier: str) -> tuple[list[_Measured], float | None]:
    """The measurements with these weights and this verifier by K, and the plain verifier's seconds a token."""
    revision = weights_revision(directory)
    measured, plain_s = [], None
    for variant in report.variants:
        metrics = report.metrics(variant)
        if metrics is None or metrics.tpot_s is None or Path(variant.verifier).resolve() != Path(verifier).resolve():
            continue
        accepted = metrics.acceptance
        if variant.draft is None and variant.algorithm is None:
            plain_s = metrics.tpot_s.mean if plain_s is None else plain_s
        elif variant.draft_revision == revision and accepted and accepted.steps:
            tokens = variant.num_speculative_tokens or accepted.num_speculative_tokens
            measured.append(_Measured(tokens, metrics.tpot_s.mean, accepted))
    return sorted(measured, key=lambda m: m.tokens), plain_s


def _find(directory: Path, report: Path | None) -> Path | None:
    if report is not None:
        file = report / REPORT_FILE if report.is_dir() else report
        if not file.is_file():
            raise UserError(f"--report: {file} does not exist; give a report.json or the directory of a bench run.")
        return file
    run = _run_of(directory)
    places = (run / "bench" / REPORT_FILE, run.parent / "bench" / REPORT_FILE)
    return next((place for place in places if place.is_file()), None)


def _run_of(directory: Path) -> Path:
    """The run that a checkpoint directory belongs to, itself if it lies alone."""
    return directory.parent.parent if directory.parent.name == CHECKPOINTS else directory

"""Names of variants become verifiers and drafts on disk.

A variant is `baseline` (the plain verifier, always measured first), an algorithm (its run under `--runs-dir`), the path
of a run or checkpoint, `fp8` (the quantised verifier), these joined by `+`, and `@K` for K speculative tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.records import BASELINE, Variant
from bench.tasks import closest_first
from speculators import checkpoint
from speculators.algorithms import ALGORITHMS
from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.schema import read_json
from speculators.verifier import Verifier, weights_revision

FP8 = "fp8"
FP8_DIRECTORY = "verifier-fp8"


class Parsed(NamedTuple):
    """A variant's name taken apart."""

    name: str
    draft: Path | None
    config: DraftConfig | None
    fp8: bool
    num_speculative_tokens: int | None


def parse(name: str, runs_dir: Path) -> Parsed:
    """Take a name apart and find its draft.

    Raises:
        UserError: an unknown name (the sentence lists the known ones, the closest first), or a draft that is not there.
    """
    if Path(name).exists() and name not in {FP8, *ALGORITHMS}:
        draft = checkpoint.resolve(Path(name))
        return Parsed(name, draft, checkpoint.read_config(draft), False, None)
    stem, at, count = name.rpartition("@") if "@" in name else (name, "", "")
    if at and not (count.isdigit() and int(count) > 0):
        raise UserError(
            f"--compare: {name!r} has {count!r} after @; give a number of speculative tokens, such as dflash@4."
        )
    parts = stem.split("+")
    others = [part for part in parts if part != FP8]
    if len(others) > 1:
        raise UserError(f"--compare: {name!r} joins several drafts ({', '.join(others)}); a server runs one.")
    if not others:
        if at:
            raise UserError(f"--compare: {name!r} has no draft, so @{count} means nothing; give @K with a draft.")
        return Parsed(name, None, None, True, None)
    draft = _find_draft(others[0], runs_dir)
    return Parsed(name, draft, checkpoint.read_config(draft), FP8 in parts, int(count) if at else None)


def _find_draft(name: str, runs_dir: Path) -> Path:
    if name not in ALGORITHMS:
        if Path(name).exists():
            return checkpoint.resolve(Path(name))
        known = closest_first(name, [BASELINE, FP8, *ALGORITHMS])
        raise UserError(
            f"--compare: unknown variant {name!r}; known are {', '.join(known)}, or the path of a run or checkpoint, "
            "joined by + and with @K for K speculative tokens."
        )
    runs = [run for run in _draft_runs(runs_dir) if _algorithm(run) == name]
    if not runs:
        raise UserError(
            f"--compare: {name}: no run of it under {runs_dir}; train one with `speculators train --speculator-type "
            f"{name}`, or name another place with --runs-dir."
        )
    return checkpoint.resolve(max(runs, key=lambda run: (run.name == name, _best_length(run))))


def _draft_runs(runs_dir: Path) -> list[Path]:
    if not runs_dir.is_dir():
        raise UserError(f"--runs-dir: {runs_dir} is not a directory; give the one that holds the runs.")
    return [path for path in sorted(runs_dir.iterdir()) if path.is_dir() and checkpoint.is_draft(path)]


def _algorithm(run: Path) -> str | None:
    try:
        return checkpoint.read_config(checkpoint.resolve(run)).algorithm
    except UserError:  # a run without a checkpoint so far is no candidate
        return None


def _best_length(run: Path) -> float:
    best = run / checkpoint.BEST
    return read_json(best, checkpoint.Best, "the best checkpoint's name").acceptance_length if best.exists() else 0.0


def verifier_of(parsed: Sequence[Parsed]) -> str:
    """The one verifier that the drafts were trained for."""
    paths = {p.config.verifier: p.name for p in parsed if p.config}
    if not paths:
        raise UserError(
            "--verifier is missing: no draft among the variants tells which verifier is meant; give its directory."
        )
    if len(paths) > 1:
        listed = ", ".join(f"{name} has {path}" for path, name in paths.items())
        raise UserError(
            f"--compare: the drafts were trained for different verifiers ({listed}); compare drafts of one."
        )
    return next(iter(paths))


def to_variant(parsed: Parsed, verifier: Verifier, runs_dir: Path, fp8_reason: str | None) -> Variant:
    """What is served under the name; raises UserError for a draft of another verifier."""
    config = parsed.config
    if config and config.verifier_revision and config.verifier_revision != verifier.revision:
        raise UserError(
            f"--compare: {parsed.name}: {parsed.draft} was trained for another verifier (revision "
            f"{config.verifier_revision}; {verifier.path} has {verifier.revision}); give its own with --verifier."
        )
    return Variant(
        name=parsed.name,
        verifier=str((runs_dir / FP8_DIRECTORY).resolve()) if parsed.fp8 else verifier.path,
        fp8=parsed.fp8,
        draft=str(parsed.draft.resolve()) if parsed.draft else None,
        draft_revision=weights_revision(parsed.draft) if parsed.draft else None,
        algorithm=config.algorithm if config else None,
        num_speculative_tokens=(parsed.num_speculative_tokens or config.num_speculative_tokens) if config else None,
        skip_reason=fp8_reason if parsed.fp8 else None,
    )

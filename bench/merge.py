"""One run or several as one: what a report is computed from. Each run's variants keep to their own run's baseline.

The trap: two runs may only be put into one table if they were made under equal conditions; with `force` they are, and
the differences are handed on so that every rendering says so.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.conditions import Conditions
from bench.imports import is_foreign, read_foreign
from bench.packed import read_packed
from bench.records import BASELINE, BenchRun, RequestRecord
from speculators.errors import UserError


class Loaded(NamedTuple):
    """A run, or several as one.

    Attributes:
        references: variant -> the baseline that it is compared with.
        sources: directory -> how its variants are called here, by their names there.
        differences: unequal conditions that were forced together, a sentence each.
        commands: what each run was made with.
    """

    run: BenchRun
    records: list[RequestRecord]
    references: dict[str, str]
    sources: dict[Path, dict[str, str]]
    differences: tuple[str, ...]
    commands: tuple[str, ...]


class _Piece(NamedTuple):
    name: str
    directory: Path | None
    run: BenchRun
    records: list[RequestRecord]


def load(sources: Sequence[str | Path], force: bool = False) -> Loaded:
    """Read bench directories and other tools' results (`FILE.json` or `NAME=FILE.json`) as one run.

    Raises:
        UserError: not a run, one that cannot be read, or unequal conditions without `force`.
    """
    pieces = [_read(str(source)) for source in sources]
    differences = tuple(text for piece in pieces[1:] for text in unequal(pieces[0], piece))
    if differences and not force:
        raise UserError(
            f"{pieces[0].name} and others were made under unequal conditions ({differences[0]}), so their numbers "
            "cannot be compared; leave one out, or compare them all the same with --force."
        )
    names = _names(pieces)
    records = [
        record
        if here[record.variant] == record.variant
        else record.model_copy(update={"variant": here[record.variant]})
        for piece, here in zip(pieces, names, strict=True)
        for record in piece.records
        if record.variant in here
    ]
    references: dict[str, str] = {}
    for here in names:
        own = here.get(BASELINE, BASELINE)
        references |= {name: own for name in here.values() if name != own}
    directories = {p.directory: here for p, here in zip(pieces, names, strict=True) if p.directory}
    commands = tuple(dict.fromkeys(piece.run.provenance.command for piece in pieces if piece.directory))
    return Loaded(_merged(pieces, names), records, references, directories, differences, commands)


def unequal(first: "_Piece", second: "_Piece") -> list[str]:
    """Which conditions of two runs differ; points never do, and prompts only on tasks that both have."""
    texts = []
    for key in Conditions.model_fields:
        a, b = getattr(first.run.conditions, key), getattr(second.run.conditions, key)
        if key == "prompts":
            a, b = ({task: one[task] for task in sorted(one) if task in other} for one, other in ((a, b), (b, a)))
        if key != "points" and a != b:
            texts.append(f"{key} is {a} in {first.name} and {b} in {second.name}")
    return texts


def _read(source: str) -> _Piece:
    if is_foreign(source):
        run, records = read_foreign(source)
        return _Piece(source, None, run, records)
    directory = Path(source)
    return _Piece(source, directory, BenchRun.read(directory), read_packed(directory))


def _names(pieces: Sequence[_Piece]) -> list[dict[str, str]]:
    """For each run how its variants are called: as there, with the run's number where the name is taken."""
    taken: set[str] = set()
    names = []
    for number, piece in enumerate(pieces, start=1):
        here = {v.name: f"{v.name} (run {number})" if v.name in taken else v.name for v in piece.run.variants}
        taken |= set(here.values())
        names.append(here)
    return names


def _merged(pieces: Sequence[_Piece], names: Sequence[dict[str, str]]) -> BenchRun:
    """The first run with everything that the others add; its provenance is the first one's."""
    runs = [piece.run for piece in pieces]
    first = runs[0]
    if len(runs) == 1:
        return first
    conditions = first.conditions.model_copy(
        update={
            "prompts": {task: digest for run in reversed(runs) for task, digest in run.conditions.prompts.items()},
            "points": tuple(dict.fromkeys(point for run in runs for point in run.conditions.points)),
        }
    )
    renamed = list(zip(runs, names, strict=True))
    return first.model_copy(
        update={
            "conditions": conditions,
            "tasks": tuple({task.name: task for run in reversed(runs) for task in run.tasks}.values()),
            "variants": tuple(
                v.model_copy(update={"name": here[v.name]}) for run, here in renamed for v in run.variants
            ),
            "outcomes": {here[name]: outcome for run, here in renamed for name, outcome in run.outcomes.items()},
            "points": tuple(
                p.model_copy(update={"variant": here.get(p.variant, p.variant)})
                for run, here in renamed
                for p in run.points
            ),
        }
    )

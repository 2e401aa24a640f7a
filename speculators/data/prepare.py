"""`speculators prepare`: conversations to tokens and loss masks, split by conversation, with what was left off and why.

The split hashes the conversation id, so a conversation stays on its side when the data grows, with all its turns.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import Field

from speculators.data.conversations import ROW_SHAPES, Dropped
from speculators.data.json_options import JsonObject
from speculators.data.progress import progress_bar
from speculators.data.row_files import count_rows, read_rows
from speculators.data.samples import (
    FORMAT_VERSION,
    SPLITS,
    DataDirectory,
    DataManifest,
    Split,
    SplitStats,
    TokenizedSample,
    sample_id,
)
from speculators.data.template import tokenize_conversation
from speculators.data.token_rows import all_token_rows
from speculators.data.vocab import VocabMap
from speculators.errors import UserError
from speculators.provenance import available_cores
from speculators.schema import Strict
from speculators.verifier import Verifier

RowT = TypeVar("RowT")
_ROWS_A_WORKER = 2000
"""A process has to import transformers first: seconds, in which another one tokenises so many rows."""

__all__ = ["PrepareOptions", "PrepareSummary", "prepare", "split_by_conversation", "tokenize_conversation"]


class PrepareOptions(Strict):
    """Turn conversations into tokens and loss masks for one verifier."""

    verifier: str = Field(description="Hugging Face directory of the verifier.")
    data: tuple[Path, ...] = Field(description="JSONL, JSON (a list) or parquet files of conversations.", min_length=1)
    output: Path = Field(description="Data directory to write; an older one there is replaced.")
    max_length: int = Field(2048, ge=2, description="Longest sample in tokens; the rest of a longer one is cut.")
    validation_share: float = Field(0.05, ge=0, lt=1, description="Share of conversations held out, chosen by hash.")
    chat_template_kwargs: JsonObject | None = Field(
        None,
        description="Arguments of the chat template as JSON, '{\"enable_thinking\": false}' (default: those that "
        "`regenerate` had for a row).",
    )
    workers: int | None = Field(
        None, ge=1, description="Processes that tokenise (default: one a core, one for less than a few thousand rows)."
    )
    draft_vocab_size: int = Field(8192, ge=1, description="Size whose coverage is shown; training chooses the size.")
    json_output: bool = Field(
        False, description="Print the summary as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )


class PrepareSummary(Strict):
    """What became of the rows."""

    output: str
    rows: int
    ready_tokens: int
    cut_to_max_length: int
    split_into_turns: int
    without_reasoning: int
    dropped: dict[str, int]
    splits: dict[Split, SplitStats]
    coverage: dict[int, float]


def prepare(options: PrepareOptions) -> PrepareSummary:
    """Read the files, tokenise, split and write the data directory (atomically).

    Raises:
        UserError: no usable conversation, an unreadable file, a template that cannot be followed, an output directory
            that is something else, or a draft vocabulary larger than the verifier's.
    """
    verifier = Verifier.read(options.verifier)
    _check_output(options.output)
    VocabMap.from_counts(np.zeros(verifier.vocab_size, np.int64), options.draft_vocab_size, verifier.eos_token_ids)
    tally: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    samples = list(_samples(verifier, options, tally, dropped))
    if not samples:
        found = "; ".join(f"{count} x {reason}" for reason, count in dropped.most_common(5)) or "no rows at all"
        files = ", ".join(map(str, options.data))
        raise UserError(f"--data: {files}: no usable conversation; each row needs {ROW_SHAPES}; found: {found}.")

    held_out = split_by_conversation({s.conversation_id for s in samples}, options.validation_share)
    samples.sort(key=lambda s: s.sample_id)
    splits: dict[Split, list[TokenizedSample]] = {
        "train": [s for s in samples if s.conversation_id not in held_out],
        "validation": [s for s in samples if s.conversation_id in held_out],
    }
    counts = _token_counts(splits["train"], verifier.vocab_size)
    manifest = DataManifest(
        format_version=FORMAT_VERSION,
        verifier=verifier.path,
        verifier_revision=verifier.revision,
        template_hash=verifier.template_hash,
        max_length=options.max_length,
        validation_share=options.validation_share,
        vocab_size=verifier.vocab_size,
        splits={name: SplitStats.of(splits[name]) for name in SPLITS},
        chat_template_kwargs=options.chat_template_kwargs,
    )
    DataDirectory.write(options.output, manifest, counts, dict(splits))
    return PrepareSummary(
        output=str(options.output),
        rows=tally["rows"],
        ready_tokens=tally["exact"],
        cut_to_max_length=tally["cut"],
        split_into_turns=tally["split"],
        without_reasoning=tally["without reasoning"],
        dropped=dict(dropped.most_common()),
        splits=manifest.splits,
        coverage=_coverage(counts, options.draft_vocab_size, verifier.eos_token_ids),
    )


def split_by_conversation(conversation_ids: Collection[str], validation_share: float) -> frozenset[str]:
    """The held-out conversation ids: those whose hash, read as a fraction, is below `validation_share`.

    With two conversations or more neither side is left empty (unless the share is 0): the one with the smallest hash
    is held out, the one with the largest is trained on. That exception alone may move when the data grows.
    """
    ranked = sorted(conversation_ids, key=_fraction)
    if validation_share == 0 or len(ranked) < 2:
        return frozenset()
    held_out = sum(_fraction(name) < validation_share for name in ranked)
    return frozenset(ranked[: min(max(held_out, 1), len(ranked) - 1)])


def _fraction(conversation_id: str) -> float:
    return int.from_bytes(hashlib.sha256(conversation_id.encode()).digest()[:8], "big") / 2**64


def tokenize_files(verifier: Verifier, files: tuple[Path, ...], max_length: int) -> list[TokenizedSample]:
    """The samples of these files in their order, cut to `max_length`; rows that cannot be used are left out."""
    options = PrepareOptions(verifier=verifier.path, data=files, output=Path(), max_length=max_length, workers=1)
    return list(_samples(verifier, options, Counter(), Counter()))


def _samples(
    verifier: Verifier, options: PrepareOptions, tally: Counter[str], dropped: Counter[str]
) -> Iterator[TokenizedSample]:
    """Samples of all files; counts rows, cuts and splits in `tally` and every loss with its reason in `dropped`."""
    seen: set[str] = set()
    number = sum(map(count_rows, options.data))
    workers = options.workers or max(1, min(available_cores(), number // _ROWS_A_WORKER))
    rows = (row for file in options.data for row in read_rows(file))
    for row in _with_progress(all_token_rows(verifier, options.chat_template_kwargs, rows, workers), number):
        tally["rows"] += 1
        if isinstance(row, Dropped):
            dropped[row.reason] += 1
            continue
        tally["split"] += len(row.tokens) > 1
        tally["exact"] += row.exact
        tally["without reasoning"] += row.without_reasoning
        for ids, mask in row.tokens:
            tally["cut"] += len(ids) > options.max_length
            ids, mask = ids[: options.max_length], mask[: options.max_length]
            name = sample_id(ids)
            if not mask.any():
                dropped["no supervised token (within --max-length)"] += 1
            elif ids.min() < 0 or ids.max() >= verifier.vocab_size:
                dropped["a token id outside the verifier's vocabulary"] += 1
            elif name in seen:
                dropped["duplicate of another row"] += 1
            else:
                seen.add(name)
                yield TokenizedSample(name, row.conversation_id, row.source, ids, mask)


def _with_progress(rows: Iterable[RowT], number: int) -> Iterator[RowT]:
    """The rows, counted by a bar on stderr."""
    with progress_bar("prepare") as progress:
        yield from progress.track(rows, total=number)


def _check_output(output: Path) -> None:
    """Never replace a directory that is not ours."""
    if output.exists() and not (output / "manifest.json").exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} exists and is not a data directory; choose another path.")


def _token_counts(samples: Iterable[TokenizedSample], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        counts += np.bincount(sample.ids[sample.loss_mask], minlength=vocab_size)
    return counts


def _coverage(counts: np.ndarray, size: int, always: tuple[int, ...]) -> dict[int, float]:
    """Coverage of the asked draft vocabulary and of its neighbours, by size."""
    sizes = sorted(
        {min(s, len(counts)) for s in (size // 4, size // 2, size, size * 2, size * 4) if s > len(set(always))}
    )
    return {s: VocabMap.from_counts(counts, s, always).coverage for s in sizes}

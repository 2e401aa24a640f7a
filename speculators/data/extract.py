"""Fill a hidden-state cache from a data directory: what is missing, does it fit on the disk, fetch, check, store.

Where the states come from is a function of the token ids: vLLM servers (`Endpoints`) or transformers in this process
(`speculators.data.extract_local`). Cached samples are skipped, so an interrupted extraction continues.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from speculators.data.endpoints import GivenUpError
from speculators.data.extract_options import ExtractOptions, ExtractSummary, check_layer_ids
from speculators.data.hidden_states import CacheManifest, HiddenStateCache
from speculators.data.samples import SPLITS, DataDirectory, TokenizedSample
from speculators.data.stored_states import Fetch
from speculators.errors import UserError
from speculators.verifier import Verifier

_STALE_S = 3600.0
_SPARE_BYTES = 256 << 20
_FILE_OVERHEAD_BYTES = 4096


class Plan(NamedTuple):
    """An extraction that can begin: everything that can be refused has been checked.

    Attributes:
        verifier: whose states.
        cache: open for writing.
        missing: samples that are not in the cache, each once.
        every: all samples of the data directory, or of the shard, each once.
        size_bytes: what the missing ones will take on the disk.
    """

    verifier: Verifier
    cache: HiddenStateCache
    missing: list[TokenizedSample]
    every: list[TokenizedSample]
    size_bytes: int

    @property
    def longest(self) -> int:
        """Tokens of the longest missing sample, 0 when none is missing."""
        return max((len(sample.ids) for sample in self.missing), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the missing samples."""
        return sum(len(sample.ids) for sample in self.missing)

    def summary(self, seconds: float) -> ExtractSummary:
        """What was done, once it is."""
        return ExtractSummary(
            output=str(self.cache.path),
            aux_layer_ids=self.cache.manifest.aux_layer_ids,
            samples=len(self.every),
            extracted=len(self.missing),
            tokens=self.tokens,
            seconds=round(seconds, 2),
            tokens_per_s=round(self.tokens / seconds, 1) if seconds else 0.0,
            size_bytes=self.size_bytes,
        )


def plan(options: ExtractOptions) -> Plan:
    """Check the options against data, verifier, cache and disk.

    Raises:
        UserError: data or cache made for something else, layers that the verifier does not have, samples that are too
            long for it, or too little space.
    """
    verifier = Verifier.read(options.verifier)
    data = DataDirectory(options.data)
    data.check_made_for(verifier)
    aux_layer_ids = options.aux_layer_ids or verifier.default_aux_layer_ids()
    check_layer_ids(aux_layer_ids, verifier)
    every = {
        sample.sample_id: sample for split in SPLITS for sample in data.split(split) if options.takes(sample.sample_id)
    }
    longest = max((len(sample.ids) for sample in every.values()), default=0)
    if longest >= verifier.max_position_embeddings:
        raise UserError(
            f"--data: {options.data} has a sample of {longest} tokens, {verifier.path} takes fewer than "
            f"{verifier.max_position_embeddings}; run `speculators prepare` with a smaller --max-length."
        )
    cache = HiddenStateCache.create(options.output, CacheManifest.of(verifier, aux_layer_ids, options.store))
    _remove_stale(cache.path)
    missing = [every[name] for name in _missing(list(every), cache)]
    size_bytes = sum(len(sample.ids) * cache.manifest.token_bytes + _FILE_OVERHEAD_BYTES for sample in missing)
    made = Plan(verifier, cache, missing, list(every.values()), size_bytes)
    _check_space(made)
    return made


def extract(made: Plan, fetch: Fetch, concurrency: int = 1, stop: Callable[[], None] = lambda: None) -> ExtractSummary:
    """Fetch, check and store every missing sample.

    Args:
        made: from `plan`.
        fetch: called from `concurrency` threads at once.
        concurrency: samples in flight.
        stop: makes `fetch` give up what is in flight.

    Raises:
        UserError: a sample could not be had, its states have another shape or are not finite, or the disk is full;
            finished samples stay in the cache.
    """
    started = time.monotonic()
    pending = _Shared(iter(made.missing))
    with _progress() as progress, ThreadPoolExecutor(concurrency) as pool:
        task = progress.add_task("extract", total=made.tokens, samples=f"0/{len(made.missing)}", speed="")

        def work() -> None:
            for sample in pending:
                made.cache.write(sample.sample_id, fetch(sample.sample_id, sample.ids))
                done = pending.count_done(len(sample.ids))
                speed = f"{done.tokens / (time.monotonic() - started):,.0f} tokens/s"
                progress.update(task, completed=done.tokens, samples=f"{done.samples}/{len(made.missing)}", speed=speed)

        try:
            for worker in as_completed([pool.submit(work) for _ in range(min(concurrency, len(made.missing)))]):
                worker.result()
        except GivenUpError as error:
            raise UserError(f"{error}. What is stored stays, and the same command continues.") from None
        finally:
            pending.close()
            stop()
    return made.summary(time.monotonic() - started)


class _Done(NamedTuple):
    samples: int
    tokens: int


class _Shared:
    """The samples still to do, handed out to threads one by one until closed, and the count of those done."""

    def __init__(self, samples: Iterator[TokenizedSample]) -> None:
        self._samples = samples
        self._lock = threading.Lock()
        self._done = _Done(0, 0)
        self._closed = False

    def __iter__(self) -> Iterator[TokenizedSample]:
        while True:
            with self._lock:
                sample = None if self._closed else next(self._samples, None)
            if sample is None:
                return
            yield sample

    def count_done(self, tokens: int) -> _Done:
        with self._lock:
            self._done = _Done(self._done.samples + 1, self._done.tokens + tokens)
            return self._done

    def close(self) -> None:
        with self._lock:
            self._closed = True


def _progress() -> Progress:
    columns = (
        "{task.description}",
        BarColumn(),
        "{task.percentage:>3.0f}%",
        "{task.fields[samples]}",
        "{task.fields[speed]}",
    )
    made = [column if isinstance(column, BarColumn) else TextColumn(column) for column in columns]
    return Progress(*made, TimeRemainingColumn(), console=Console(file=sys.stderr))


def _missing(sample_ids: list[str], cache: HiddenStateCache) -> list[str]:
    """Samples that are not stored, or damaged as far as that can be told without a checksum."""
    missing: list[str] = []
    stored: list[str] = []
    for sample_id in sample_ids:
        (stored if sample_id in cache else missing).append(sample_id)
    unknown = cache.index.without_line(stored)
    if unknown:
        print(f"{cache.path}: {len(unknown)} stored samples are not in the index; reading them.", file=sys.stderr)
    damaged = cache.index_again(unknown)
    if damaged:
        print(
            f"{cache.path}: {len(damaged)} of them are damaged and are extracted again (first: {damaged[0]}).",
            file=sys.stderr,
        )
    return missing + damaged


def _check_space(made: Plan) -> None:
    free = shutil.disk_usage(made.cache.path).free
    if made.missing:
        print(
            f"extract: {len(made.missing)} of {len(made.every)} samples to do, {_gib(made.size_bytes)} to write, "
            f"{_gib(free)} free at {made.cache.path}",
            file=sys.stderr,
        )
    if made.size_bytes + _SPARE_BYTES > free:
        raise UserError(
            f"--output: {made.cache.path} has {_gib(free)} free, the hidden states need {_gib(made.size_bytes)}; "
            "free some space, choose another disk, or prepare fewer samples."
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"


def _remove_stale(cache: Path) -> None:
    """Temporary files that a killed extraction left behind; young ones may belong to one that is running."""
    for leftover in cache.glob("*/.*.tmp"):
        if time.time() - leftover.stat().st_mtime > _STALE_S:
            leftover.unlink(missing_ok=True)

"""From samples and cached hidden states to packed rows, read ahead by one thread while the draft computes.

Rows have as many tokens as their samples: nothing is padded. An error of the reading thread is raised where the next
row is asked for, as it was.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from speculators.algorithms.base import Batch
from speculators.data.hidden_states import HiddenStateCache, HiddenStates
from speculators.data.packing import pack_rows
from speculators.data.samples import SampleList, Split, TokenizedSample
from speculators.errors import UserError


class PackedRows:
    """The rows of one split. Samples without a supervised token are left out (`num_left_out`)."""

    def __init__(
        self, samples: SampleList, cache: HiddenStateCache, split: Split, row_length: int, seed: int, pin: bool = False
    ) -> None:
        self._samples, self._cache, self._pin = samples, cache, pin
        usable = [i for i, sample in enumerate(samples) if sample.loss_mask[1:].any()]
        self.num_left_out = len(samples) - len(usable)
        lengths = samples.lengths[usable]
        self.num_tokens = int(lengths.sum())
        self.rows = [tuple(usable[i] for i in row) for row in pack_rows(lengths, row_length, seed)]
        self.fullness = self.num_tokens / (row_length * len(self.rows)) if self.rows else 0.0
        self._check_cached(usable, split)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and of how they are packed: a resumed run must see the same."""
        names = [self._samples[i].sample_id for row in self.rows for i in row]
        sizes = [len(row) for row in self.rows]
        return hashlib.sha256(repr((names, sizes)).encode()).hexdigest()[:16]

    def read(self, row: int) -> Batch:
        """Read one row from the cache.

        Raises:
            UserError: hidden states are missing, damaged, not finite or of other tokens; the file is named.
        """
        samples = [self._samples[i] for i in self.rows[row]]
        states = [self._cache.read(sample.sample_id, sample.ids) for sample in samples]
        batch = row_of(samples, states)
        return _map_tensors(batch, torch.Tensor.pin_memory) if self._pin else batch

    def _check_cached(self, usable: list[int], split: Split) -> None:
        missing = [sample_id for i in usable if (sample_id := self._samples[i].sample_id) not in self._cache]
        if missing:
            raise UserError(
                f"--hidden-states: {self._cache.path} lacks {len(missing)} of the {len(usable)} samples of the {split} "
                f"split (first: {missing[0]}); run `speculators extract` again, it continues."
            )


def row_of(samples: Sequence[TokenizedSample], states: Sequence[HiddenStates]) -> Batch:
    """Samples side by side in one row of as many tokens as they have."""
    lengths = [len(sample.ids) for sample in samples]
    return Batch(
        ids=torch.from_numpy(np.concatenate([sample.ids for sample in samples]).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        document_ids=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        loss_mask=torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples])),
        aux_hidden=torch.cat([s.aux_hidden for s in states]),
        last_hidden=torch.cat([s.last_hidden for s in states]),
        sample_ids=tuple(sample.sample_id for sample in samples),
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; from pinned memory the copy overlaps with computing."""
    return batch if batch.ids.device == device else _map_tensors(batch, lambda t: t.to(device, non_blocking=True))


def _map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return Batch(*(change(field) if isinstance(field, torch.Tensor) else field for field in batch))


class ReadAhead:
    """A context manager that reads `rows` in order, at most `depth` ahead, in a thread that ends with it."""

    def __init__(self, read: Callable[[int], Batch], rows: Iterable[int], depth: int = 4) -> None:
        self._read, self._rows = read, rows
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)

    def __enter__(self) -> "ReadAhead":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def next(self) -> Batch:
        """The next row, waiting for it if need be; raises what reading it raised, StopIteration after the last."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # asking again raises again instead of waiting forever
            raise item
        return item

    def _work(self) -> None:
        try:
            for row in self._rows:
                if not self._put(self._read(row)):
                    return
            self._put(StopIteration())
        except BaseException as error:  # whatever it is, it belongs to the thread that asks
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

"""From samples and their hidden states to packed rows, read ahead by one thread while the draft computes.

Rows have as many tokens as their samples: nothing is padded. An error of the reading thread is raised where the next
row is asked for, as it was. The trap: a row whose samples are all left out still comes, as a stand-in that must not be
counted (`is_stand_in`), because every rank has as many rows in a step as the others.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from speculators.algorithms.base import Batch
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.on_demand import OnDemand, Shape
from speculators.data.packing import pack_rows
from speculators.data.prefetch import Prefetch
from speculators.data.samples import SampleList, Split, TokenizedSample
from speculators.data.stored_states import HiddenStates


class PackedRows:
    """The rows of one split. Samples without a supervised token are left out (`num_left_out`).

    `num_missing` counts the samples that were not in the cache at the start.
    """

    def __init__(
        self,
        samples: SampleList,
        states: HiddenStateCache | OnDemand,
        split: Split,
        row_length: int,
        seed: int,
        pin: bool = False,
    ) -> None:
        """
        Raises:
            UserError: samples are not in the cache, and the policy is to refuse that.
        """
        self._samples, self._split, self._pin = samples, split, pin
        self._states = states if isinstance(states, OnDemand) else OnDemand(states)
        usable = [i for i, sample in enumerate(samples) if sample.loss_mask[1:].any()]
        self.num_left_out = len(samples) - len(usable)
        lengths = samples.lengths[usable]
        self.num_tokens = int(lengths.sum())
        self.rows = [tuple(usable[i] for i in row) for row in pack_rows(lengths, row_length, seed)]
        self.fullness = self.num_tokens / (row_length * len(self.rows)) if self.rows else 0.0
        self.num_missing = self._states.check([samples[i] for i in usable], split)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and of how they are packed: a resumed run must see the same."""
        names = [self._samples[i].sample_id for row in self.rows for i in row]
        sizes = [len(row) for row in self.rows]
        return hashlib.sha256(repr((names, sizes)).encode()).hexdigest()[:16]

    def ahead(self, rows: Iterable[int]) -> "ReadAhead":
        """A reader of these rows, in order; what must be fetched is asked for long before its row's turn."""
        if self._states.pool is None:
            return ReadAhead(self.read, rows)
        fetch = Prefetch(self._states, self._samples_of, self._split)
        read = lambda row: self._batch(self._samples_of(row), fetch.states(row))  # noqa: E731
        return ReadAhead(read, fetch.in_order(rows), prefetch=fetch)

    def read(self, row: int) -> Batch:
        """Read one row.

        Raises:
            UserError: hidden states are missing, damaged, not finite or of other tokens; the file is named.
        """
        samples = self._samples_of(row)
        return self._batch(samples, [self._states.states(sample, self._split) for sample in samples])

    def _samples_of(self, row: int) -> list[TokenizedSample]:
        return [self._samples[i] for i in self.rows[row]]

    def _batch(self, samples: list[TokenizedSample], states: list[HiddenStates | None]) -> Batch:
        there = [(sample, held) for sample, held in zip(samples, states, strict=True) if held is not None]
        batch = row_of(*zip(*there, strict=True)) if there else _stand_in(samples, self._states.shape)
        return _map_tensors(batch, torch.Tensor.pin_memory) if self._pin else batch


def is_stand_in(batch: Batch) -> bool:
    """Whether the row takes the place of one whose samples were all left out: nothing in it may be counted."""
    return not batch.sample_ids


def _stand_in(samples: Sequence[TokenizedSample], shape: Shape) -> Batch:
    """The row's tokens over states of zeros: every computation on it is finite, whatever draft it is."""
    zeros = [
        HiddenStates(
            torch.from_numpy(np.array(sample.ids)),
            torch.zeros(len(sample.ids), len(shape.aux_layer_ids), shape.hidden_size, dtype=torch.bfloat16),
            torch.zeros(len(sample.ids), shape.hidden_size, dtype=torch.bfloat16),
        )
        for sample in samples
    ]
    return row_of(samples, zeros)._replace(sample_ids=())


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

    def __init__(
        self, read: Callable[[int], Batch], rows: Iterable[int], depth: int = 4, prefetch: Prefetch | None = None
    ) -> None:
        self._read, self._rows, self._prefetch = read, rows, prefetch
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)

    def __enter__(self) -> "ReadAhead":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._prefetch:
            self._prefetch.close()
        self._thread.join()
        if self._prefetch:
            self._prefetch.release()

    def next(self) -> Batch:
        """The next row, waiting for it if need be; raises what reading it raised, StopIteration after the last."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # asking again raises again instead of waiting forever
            raise item
        if self._prefetch:
            self._prefetch.taken()
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

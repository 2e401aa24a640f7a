"""Which samples share a row, and which rank reads which row in which step. Pure arithmetic, no tensors.

Everything follows from (seed, epoch, row): the same rows come in the same order with the same random choices after a
resume and on any number of ranks, and all ranks have equal numbers of rows in every step by construction.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

_WINDOW = 16384


class Slot(NamedTuple):
    """One row in one step of one rank.

    Attributes:
        row: index of the row.
        counted: False for a filler: the last step of an epoch can have a row too few, and then a rank repeats one
            without counting it, so that no rank waits for another.
        seed: drives every random choice about this row in this epoch.
    """

    row: int
    counted: bool
    seed: int


def pack_rows(lengths: np.ndarray, row_length: int, seed: int) -> list[tuple[int, ...]]:
    """Pack samples into rows of at most `row_length` tokens; a longer sample gets a row of its own length.

    Best-fit decreasing inside windows of shuffled samples, which bounds the time for large data sets.

    Args:
        lengths: int [N], tokens of each sample, all > 0.

    Returns:
        Rows as tuples of sample indices; each sample is in exactly one.
    """
    shuffled = np.random.default_rng((seed, 0)).permutation(len(lengths))
    rows: list[tuple[int, ...]] = []
    for start in range(0, len(shuffled), _WINDOW):
        rows += _best_fit_decreasing(shuffled[start : start + _WINDOW], lengths, row_length)
    return rows


def _best_fit_decreasing(window: np.ndarray, lengths: np.ndarray, row_length: int) -> list[tuple[int, ...]]:
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, row), ascending
    for sample in window[np.argsort(-lengths[window], kind="stable")]:
        length = int(lengths[sample])
        fit = bisect_left(rooms, (length, -1))
        if fit < len(rooms):
            room, row = rooms.pop(fit)
            rows[row].append(int(sample))
        else:
            room, row = row_length, len(rows)
            rows.append([int(sample)])
        if room > length:
            insort(rooms, (room - length, row))
    return [tuple(row) for row in rows]


class RowSchedule:
    """The rows of every step for one rank. A step takes `rows_per_step` rows of each rank; steps count from 0 through
    all epochs, so a position in the data is just a step."""

    def __init__(
        self, num_rows: int, rows_per_step: int, seed: int, rank: int = 0, world: int = 1, shuffle: bool = True
    ) -> None:
        self._num_rows, self._seed, self._rank, self._world, self._shuffle = num_rows, seed, rank, world, shuffle
        self.global_rows_per_step = rows_per_step * world
        self.steps_per_epoch = -(-num_rows // self.global_rows_per_step)
        self._order: tuple[int, np.ndarray] = (-1, np.arange(num_rows))

    def slots(self, step: int) -> list[Slot]:
        """This rank's rows of a step; every rank gets equally many."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = self._epoch_order(epoch)
        rows = order[within * self.global_rows_per_step : (within + 1) * self.global_rows_per_step]
        per_rank = -(-len(rows) // self._world)
        mine = [self._rank + i * self._world for i in range(per_rank)]
        return [self._slot(epoch, int(rows[i]) if i < len(rows) else int(rows[0]), i < len(rows)) for i in mine]

    def _slot(self, epoch: int, row: int, counted: bool) -> Slot:
        seed = int(np.random.SeedSequence((self._seed, epoch, row)).generate_state(1)[0])
        return Slot(row, counted, seed)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return self._order[1]
        known = self._order  # one read: the reading thread asks for a later epoch meanwhile
        if known[0] != epoch:
            known = (epoch, np.random.default_rng((self._seed, 1, epoch)).permutation(self._num_rows))
            self._order = known
        return known[1]

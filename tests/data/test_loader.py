"""Packing, the order of rows over ranks, building rows, reading ahead."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from speculators.data.hidden_states import CacheManifest, HiddenStateCache, HiddenStates
from speculators.data.loader import PackedRows, ReadAhead
from speculators.data.packing import RowSchedule, pack_rows
from speculators.data.samples import SampleList, TokenizedSample, _write_split, sample_id
from speculators.errors import UserError

H, A = 4, 2


@pytest.mark.parametrize("seed", [0, 1])
def test_every_sample_is_in_exactly_one_row_and_rows_are_full(seed: int):
    lengths = np.random.default_rng(seed).integers(20, 700, 3000)
    rows = pack_rows(lengths, 1024, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    totals = [int(lengths[list(row)].sum()) for row in rows]
    assert max(totals) <= 1024
    assert sum(totals) / (1024 * len(rows)) >= 0.98


def test_a_sample_longer_than_a_row_gets_a_row_of_its_own_length():
    assert sorted(pack_rows(np.array([5, 40, 3]), 8, 0)) == [(0, 2), (1,)]


def test_packing_is_the_same_for_the_same_seed_and_another_for_another():
    lengths = np.random.default_rng(0).integers(1, 50, 200)
    assert pack_rows(lengths, 64, 3) == pack_rows(lengths, 64, 3)
    assert pack_rows(lengths, 64, 3) != pack_rows(lengths, 64, 4)


@pytest.mark.parametrize("num_rows", [1, 7, 12, 13])
@pytest.mark.parametrize(("world", "per_rank"), [(1, 1), (2, 1), (2, 3), (5, 2)])
def test_ranks_take_equal_steps_and_count_each_row_once_an_epoch(num_rows: int, world: int, per_rank: int):
    ranks = [RowSchedule(num_rows, per_rank, 0, rank, world) for rank in range(world)]
    for epoch in range(2):
        counted = []
        for step in range(epoch * ranks[0].steps_per_epoch, (epoch + 1) * ranks[0].steps_per_epoch):
            slots = [schedule.slots(step) for schedule in ranks]
            assert len({len(mine) for mine in slots}) == 1
            counted += [slot.row for mine in slots for slot in mine if slot.counted]
        assert sorted(counted) == list(range(num_rows))


def test_a_step_has_the_same_rows_and_seeds_however_many_ranks_share_it():
    one = RowSchedule(13, 6, 0)
    three = [RowSchedule(13, 2, 0, rank, 3) for rank in range(3)]
    for step in range(2 * one.steps_per_epoch):
        together = [slot for schedule in three for slot in schedule.slots(step) if slot.counted]
        assert sorted(together) == sorted(one.slots(step))


def test_epochs_differ_in_order_and_repeat_for_the_same_seed():
    schedule = RowSchedule(50, 1, 0)
    first = [schedule.slots(step)[0] for step in range(100)]
    assert [s.row for s in first[:50]] != [s.row for s in first[50:]]
    assert len({s.seed for s in first}) == 100
    jumped = RowSchedule(50, 1, 0)
    assert jumped.slots(73) == schedule.slots(73)


@pytest.fixture
def store(tmp_path: Path) -> tuple[SampleList, HiddenStateCache]:
    random = np.random.default_rng(0)
    manifest = CacheManifest(
        format_version=1,
        verifier="v",
        verifier_revision="r",
        template_hash="t",
        aux_layer_ids=(1, 2),
        hidden_size=H,
        dtype="bfloat16",
    )
    cache = HiddenStateCache.create(tmp_path / "cache", manifest)
    samples = []
    for i, length in enumerate((5, 3, 6, 4, 7)):
        ids = random.integers(0, 100, length).astype(np.int32)
        mask = random.random(length) < 0.5
        mask[1] = i != 4
        if i == 4:
            mask[:] = False
        samples.append(TokenizedSample(sample_id(ids), str(i), "", ids, mask))
        aux, last = torch.randn(length, A, H).bfloat16(), torch.randn(length, H).bfloat16()
        cache.write(samples[-1].sample_id, HiddenStates(torch.from_numpy(ids), aux, last))
    _write_split(tmp_path / "train", samples)
    return SampleList(tmp_path / "train"), cache


def test_a_row_is_its_samples_one_after_another(store: tuple[SampleList, HiddenStateCache]):
    samples, cache = store
    packed = PackedRows(samples, cache, "train", 9, 0)
    assert packed.num_left_out == 1
    assert packed.num_tokens == 18
    for row in range(len(packed)):
        batch, at = packed.read(row), 0
        for document, i in enumerate(packed.rows[row]):
            sample = samples[i]
            states = cache.read(sample.sample_id, sample.ids)
            for t in range(len(sample.ids)):
                assert batch.ids[at] == sample.ids[t]
                assert batch.positions[at] == t
                assert batch.document_ids[at] == document
                assert batch.loss_mask[at] == sample.loss_mask[t]
                assert torch.equal(batch.aux_hidden[at], states.aux_hidden[t])
                assert torch.equal(batch.last_hidden[at], states.last_hidden[t])
                at += 1
        assert at == len(batch.ids) == len(batch.aux_hidden) == len(batch.last_hidden)
        assert batch.sample_ids == tuple(samples[i].sample_id for i in packed.rows[row])
        assert (batch.ids.dtype, batch.positions.dtype, batch.document_ids.dtype) == (torch.int64,) * 3


def test_missing_states_are_found_before_the_first_step(store: tuple[SampleList, HiddenStateCache]):
    samples, cache = store
    cache.file(samples[2].sample_id).unlink()
    with pytest.raises(UserError, match=f"lacks 1 of the 4 samples of the train split .first: {samples[2].sample_id}"):
        PackedRows(samples, cache, "train", 9, 0)


def test_reading_ahead_keeps_the_order_and_stays_bounded():
    read: list[int] = []
    with ReadAhead(lambda row: read.append(row) or row, range(20), depth=3) as reader:  # type: ignore[arg-type, func-returns-value]
        for expected in range(20):
            assert reader.next() == expected
            # One in hand, three in the queue, one waiting to be put.
            assert len(read) <= expected + 5
        with pytest.raises(StopIteration):
            reader.next()


def test_an_error_while_reading_reaches_the_asker_unchanged_and_again():
    def read(row: int) -> int:
        if row == 2:
            raise UserError("row 2 is bad.")
        return row

    with ReadAhead(read, range(5)) as reader:  # type: ignore[arg-type]
        assert [reader.next(), reader.next()] == [0, 1]
        for _ in range(2):
            with pytest.raises(UserError, match="row 2 is bad"):
                reader.next()


def test_leaving_early_ends_the_thread():
    def endless() -> Iterator[int]:
        while True:
            yield 0

    before = threading.active_count()
    with ReadAhead(lambda row: row, endless()) as reader:  # type: ignore[arg-type, return-value]
        reader.next()
    assert threading.active_count() == before

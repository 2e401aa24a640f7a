"""Which samples are had from where, what is left out, and that waiting states stay within the budget."""

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from speculators.data.cache_manifest import CacheManifest
from speculators.data.endpoints import GivenUpError
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.loader import PackedRows, is_stand_in
from speculators.data.on_demand import Budget, OnDemand, Policy, Shape
from speculators.data.samples import SampleList, TokenizedSample, _write_split, sample_id
from speculators.data.skipped import SkippedLog, read_skipped
from speculators.data.stored_states import HiddenStates
from speculators.errors import UserError

H, LAYERS, NUM = 4, (1, 2, 5), 12


def states_of(ids: np.ndarray) -> HiddenStates:
    made = torch.from_numpy(np.random.default_rng(ids.tolist()).normal(size=(len(ids), 4, H))).bfloat16()
    return HiddenStates(torch.from_numpy(np.array(ids)), made[:, :3], made[:, 3])


def fetch(sample_id: str, ids: np.ndarray) -> HiddenStates:
    return states_of(ids)


@pytest.fixture
def samples(tmp_path: Path) -> SampleList:
    generator = np.random.default_rng(0)
    made = []
    for i in range(NUM):
        ids = generator.integers(0, 100, 4 + i % 5).astype(np.int32)
        made.append(TokenizedSample(sample_id(ids), str(i), "", ids, np.ones(len(ids), bool)))
    _write_split(tmp_path / "train", made)
    return SampleList(tmp_path / "train")


def cache_of(path: Path, held: list[TokenizedSample], dtype: str = "bfloat16", reads=LAYERS) -> HiddenStateCache:
    manifest = CacheManifest(
        format_version=1 if dtype == "bfloat16" else 2,
        verifier="v",
        verifier_revision="r",
        template_hash="t",
        aux_layer_ids=LAYERS,
        hidden_size=H,
        dtype=dtype,
    )
    cache = HiddenStateCache(path, HiddenStateCache.create(path, manifest).manifest, reads)
    for sample in held:
        cache.write(sample.sample_id, states_of(sample.ids))
    return cache


def rows_of(samples: SampleList, states: HiddenStateCache | OnDemand) -> PackedRows:
    return PackedRows(samples, states, "train", 12, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("on_generate", ["delete", "cache"])
@pytest.mark.parametrize("reads", [LAYERS, (1, 5)])
def test_every_mix_gives_the_rows_of_a_full_cache_bit_by_bit(
    samples: SampleList, tmp_path: Path, dtype: str, on_generate, reads: tuple[int, ...]
):
    whole = rows_of(samples, cache_of(tmp_path / "full", list(samples), dtype, reads))
    for held in (0, 5, NUM):
        cache = cache_of(tmp_path / f"held-{held}", list(samples)[:held], dtype, reads)
        policy = Policy("generate", on_generate)
        mixed = rows_of(samples, OnDemand(cache, fetch=fetch, policy=policy, concurrency=3))
        order = [*range(len(mixed)), 0, *range(len(mixed))]
        with mixed.ahead(order) as reader:
            for row in order:
                ours, theirs = reader.next(), whole.read(row)
                assert all(
                    torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
                    for a, b in zip(ours, theirs, strict=True)
                )
        kept = sum(sample.sample_id in cache for sample in samples)
        assert kept == (NUM if on_generate == "cache" else held)


def test_a_sample_that_is_kept_is_fetched_once(samples: SampleList, tmp_path: Path):
    asked: list[str] = []

    def counting(sample_id: str, ids: np.ndarray) -> HiddenStates:
        asked.append(sample_id)
        return states_of(ids)

    cache = cache_of(tmp_path / "hs", [])
    rows = rows_of(samples, OnDemand(cache, fetch=counting, policy=Policy("generate", "cache")))
    with rows.ahead([*range(len(rows))] * 3) as reader:
        for _ in range(3 * len(rows)):
            reader.next()
    assert sorted(asked) == sorted(sample.sample_id for sample in samples)


def test_a_disk_that_fills_up_while_states_are_kept_ends_the_run(samples: SampleList, tmp_path: Path, monkeypatch):
    cache = cache_of(tmp_path / "hs", list(samples)[:2])
    states = OnDemand(cache, fetch=fetch, policy=Policy("skip", "cache"))
    rows = rows_of(samples, states)

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    full_rows = [row for row in range(len(rows)) if states.missing([samples[i] for i in rows.rows[row]])]
    with rows.ahead(full_rows) as reader, pytest.raises(UserError, match=r"hs: the disk is full .*stay"):
        reader.next()
    assert not list((tmp_path / "hs").glob("**/.*"))


def test_left_out_samples_are_listed_and_rows_keep_their_places(samples: SampleList, tmp_path: Path):
    whole = rows_of(samples, cache_of(tmp_path / "full", list(samples)))
    gone = {samples[i].sample_id for i in whole.rows[1]} | {samples[whole.rows[2][0]].sample_id}

    def failing(sample_id: str, ids: np.ndarray) -> HiddenStates:
        if sample_id in gone:
            raise GivenUpError(f"http://x: no hidden states for sample {sample_id}")
        return states_of(ids)

    states = OnDemand(
        None, Shape(LAYERS, H, 8), fetch=failing, policy=Policy("skip"), skipped=SkippedLog(tmp_path / "run")
    )
    rows = rows_of(samples, states)
    assert (rows.rows, rows.fingerprint) == (whole.rows, whole.fingerprint)
    order = [*range(len(rows))] * 2
    with rows.ahead(order) as reader:
        for row in order:
            batch, expected = reader.next(), whole.read(row)
            assert is_stand_in(batch) == (row == 1)
            if row == 1:
                assert not batch.aux_hidden.any()
                assert batch.aux_hidden.shape == expected.aux_hidden.shape
            else:
                assert batch.sample_ids == tuple(name for name in expected.sample_ids if name not in gone)
                assert len(batch.ids) == len(batch.last_hidden) <= len(expected.ids)
    listed = read_skipped(tmp_path / "run")
    assert {record.sample_id for record in listed} == gone
    assert len((tmp_path / "run" / "skipped.jsonl").read_text().splitlines()) == len(gone)
    assert all("http://x: no hidden states" in record.reason for record in listed)


def test_too_many_left_out_in_a_row_end_the_run_and_a_good_one_between_starts_the_count_anew(samples: SampleList):
    good: set[str] = {samples[2].sample_id}

    def failing(sample_id: str, ids: np.ndarray) -> HiddenStates:
        if sample_id in good:
            return states_of(ids)
        raise GivenUpError(f"http://x: no hidden states for sample {sample_id}")

    states = OnDemand(None, Shape(LAYERS, H, 8), fetch=failing, policy=Policy("skip", max_consecutive=3))
    assert [states.states(samples[i], "train") is None for i in range(5)] == [True, True, False, True, True]
    with pytest.raises(UserError, match=f"http://x: .*{samples[5].sample_id}. .*--max-consecutive-failures"):
        states.states(samples[5], "train")


def test_generate_never_leaves_a_sample_out(samples: SampleList):
    def failing(sample_id: str, ids: np.ndarray) -> HiddenStates:
        raise GivenUpError(f"http://x: no hidden states for sample {sample_id}")

    rows = rows_of(samples, OnDemand(None, Shape(LAYERS, H, 8), fetch=failing, policy=Policy("generate")))
    first = samples[rows.rows[0][0]].sample_id
    with rows.ahead([0, 1]) as reader, pytest.raises(UserError, match=f"http://x: .*{first}. .*--on-missing skip"):
        reader.next()


def test_without_a_server_skip_leaves_out_what_the_cache_lacks_and_raise_refuses(samples: SampleList, tmp_path: Path):
    cache = cache_of(tmp_path / "hs", list(samples)[:7])
    rows = rows_of(samples, OnDemand(cache, policy=Policy("skip"), skipped=SkippedLog(tmp_path)))
    assert rows.num_missing == NUM - 7
    read = [name for row in range(len(rows)) for name in rows.read(row).sample_ids]
    assert sorted(read) == sorted(sample.sample_id for sample in samples[:7])
    assert len(read_skipped(tmp_path)) == NUM - 7
    with pytest.raises(UserError, match=rf"lacks {NUM - 7} of the {NUM} samples .*{samples[7].sample_id}"):
        rows_of(samples, cache)
    with pytest.raises(UserError, match=rf"lacks {NUM} of the {NUM} samples"):
        rows_of(samples, OnDemand(cache_of(tmp_path / "empty", []), policy=Policy("skip")))


@pytest.mark.parametrize("size", [1, 200, 10_000])
def test_states_that_wait_stay_within_the_budget_and_larger_rows_come_one_by_one(samples: SampleList, size: int):
    budget, most, lock = Budget(size), 0, threading.Lock()

    def watching(sample_id: str, ids: np.ndarray) -> HiddenStates:
        nonlocal most
        with lock:
            most = max(most, budget.held_bytes)
        return states_of(ids)

    states = OnDemand(
        None, Shape(LAYERS, H, 8), fetch=watching, policy=Policy("generate"), budget=budget, concurrency=4
    )
    rows = rows_of(samples, states)
    largest = 8 * max(sum(len(samples[i].ids) for i in row) for row in rows.rows)
    order = [*range(len(rows))] * 5
    with rows.ahead(order) as reader:
        for row in order:
            assert reader.next().sample_ids == tuple(samples[i].sample_id for i in rows.rows[row])
    assert 0 < most <= max(size, largest)
    assert budget.held_bytes == 0


def test_a_second_reader_gets_its_rows_while_the_first_holds_the_whole_budget(samples: SampleList):
    budget = Budget(1)
    states = OnDemand(None, Shape(LAYERS, H, 8), fetch=fetch, policy=Policy("generate"), budget=budget)
    rows = rows_of(samples, states)
    with rows.ahead(range(len(rows))) as training:
        training.next()
        with rows.ahead(range(len(rows))) as validation:
            assert [len(validation.next().ids) for _ in range(len(rows))]
    assert budget.held_bytes == 0


def test_leaving_early_wakes_a_reader_that_waits_for_a_slow_fetch(samples: SampleList):
    asked, release = threading.Event(), threading.Event()

    def slow(sample_id: str, ids: np.ndarray) -> HiddenStates:
        asked.set()
        release.wait()
        return states_of(ids)

    states = OnDemand(None, Shape(LAYERS, H, 8), fetch=slow, policy=Policy("generate"))
    rows = rows_of(samples, states)
    with rows.ahead(range(len(rows))):
        assert asked.wait(20)
    assert states.budget.held_bytes == 0
    assert not release.is_set()
    release.set()

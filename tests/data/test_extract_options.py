"""Shards divide the samples whatever else is there, and options that exclude each other are refused."""

import hashlib
from pathlib import Path

import pytest
from tiny import tiny_verifier

from speculators.cli.extract import command
from speculators.cli.options import resolve
from speculators.data.cache_manifest import CacheManifest
from speculators.data.extract_options import ExtractOptions
from speculators.errors import UserError

GIVEN = {"verifier": "v", "data": "d", "output": "o"}


def asked(**changed):
    return resolve(ExtractOptions, {**GIVEN, **changed})


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_every_sample_is_in_exactly_one_shard_and_shards_are_of_like_size(parts):
    names = [hashlib.sha256(str(i).encode()).hexdigest()[:16] for i in range(2000)]
    shards = [[name for name in names if asked(shard=f"{i + 1}/{parts}").takes(name)] for i in range(parts)]
    assert sorted(name for shard in shards for name in shard) == sorted(names)
    assert all(abs(len(shard) - 2000 / parts) < 5 * (2000 / parts) ** 0.5 for shard in shards)


@pytest.mark.parametrize("value", ["0/4", "5/4", "4", "a/b", "1/0", "-1/4", "1/4/2", "1.0/2"])
def test_a_shard_that_is_not_one_of_n_is_refused(value):
    with pytest.raises(UserError, match=f"--shard: .*I from 1 to N, as in 2/4 .value seen: '{value}'"):
        asked(shard=value)


def test_shards_that_share_a_directory_have_files_of_their_own():
    assert asked().file("vllm.log") == Path("o/vllm.log")
    assert asked(shard="2/4").file("extract.yaml") == Path("o/extract-2-of-4.yaml")


def test_several_endpoints_may_be_given_and_need_their_storage_directory():
    both = ("http://a:1", "http://b:2")
    assert asked(endpoint=list(both), storage_path="s").endpoint == both
    with pytest.raises(UserError, match="--endpoint needs --storage-path"):
        asked(endpoint=list(both))
    with pytest.raises(UserError, match="exclude each other"):
        asked(endpoint=list(both), storage_path="s", source="local")


def test_endpoints_are_one_flag_each_on_the_command_line():
    arguments = ["--endpoint", "http://a:1", "--endpoint", "http://b:2", "--shard", "1/2"]
    parsed = command.make_context("extract", arguments).params
    assert (parsed["endpoint"], parsed["shard"]) == (["http://a:1", "http://b:2"], "1/2")


def test_eight_bits_are_planned_at_half_the_space(tmp_path):
    verifier = tiny_verifier(tmp_path / "v").model_copy(update={"hidden_size": 4096})
    exact, rounded = (CacheManifest.of(verifier, (2, 4, 5), store).token_bytes for store in ("bf16", "fp8"))
    assert exact == 4 * 4096 * 2 + 4
    assert rounded == 4 * (4096 + 4) + 4

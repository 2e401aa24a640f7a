"""The cache refuses what it was not made for, and names a bad file instead of training on it."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import H, tiny_verifier

from speculators.data.hidden_states import NUM_CHECKED, CacheManifest, HiddenStateCache, HiddenStates
from speculators.errors import UserError
from speculators.schema import write_json

LAYERS = (2, 4, 5)
IDS = np.arange(7, dtype=np.int32)


@pytest.fixture
def verifier(tmp_path):
    return tiny_verifier(tmp_path / "v")


@pytest.fixture(params=["bf16", "fp8"])
def cache(verifier, tmp_path, request):
    return HiddenStateCache.create(tmp_path / "hs", CacheManifest.of(verifier, LAYERS, request.param))


def states(seed=0, length=len(IDS)):
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(length, len(LAYERS), H, generator=generator).bfloat16()
    return HiddenStates(torch.arange(length).int(), aux, torch.randn(length, H, generator=generator).bfloat16())


def test_what_is_written_is_read_back_layer_by_layer(cache, verifier):
    cache.write("ab12", states())
    for layers in (LAYERS, (5,), (2, 5)):
        got = HiddenStateCache.open(cache.path, verifier, layers).read("ab12", IDS)
        wanted = cache.as_read(states())
        assert got.aux_hidden.dtype == got.last_hidden.dtype == torch.bfloat16
        assert torch.equal(got.aux_hidden, wanted.aux_hidden[:, [LAYERS.index(k) for k in layers]])
        assert torch.equal(got.last_hidden, wanted.last_hidden)
        assert torch.allclose(wanted.aux_hidden, states().aux_hidden, rtol=1 / 14, atol=1e-4)
        exact = torch.equal(wanted.aux_hidden, states().aux_hidden)
        assert exact == (cache.manifest.dtype == "bfloat16")


def test_layers_that_were_not_cached_are_refused(cache, verifier):
    with pytest.raises(UserError, match=r"holds layers \[2, 4, 5\], the run asks for \[2, 6\]"):
        HiddenStateCache.open(cache.path, verifier, (2, 6))


def test_another_verifier_and_another_template_are_refused(cache, verifier):
    for field, what in (
        ("revision", "verifier"),
        ("template_hash", "chat template"),
        ("tokenizer_hash", "tokenizer"),
    ):
        with pytest.raises(UserError, match=f"made with another {what}"):
            HiddenStateCache.open(cache.path, verifier.model_copy(update={field: "other"}), LAYERS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["aux_hidden", "last_hidden"])
def test_a_value_that_is_not_finite_is_never_stored(cache, field, value):
    bad = states()
    getattr(bad, field)[3, ..., 1] = value
    with pytest.raises(UserError, match=f"{field} is not finite .first at token 3"):
        cache.write("ab12", bad)
    assert "ab12" not in cache


def test_a_file_that_went_bad_on_disk_is_named(cache):
    cache.write("ab12", states())
    file = cache.file("ab12")
    whole = file.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"ab12\.safetensors: truncated or damaged"):
            cache.read("ab12", IDS)


def test_states_of_other_tokens_are_refused(cache):
    cache.write("ab12", states())
    with pytest.raises(UserError, match="holds the states of other tokens"):
        cache.read("ab12", IDS[::-1])


def test_a_missing_sample_says_how_to_get_it(cache):
    with pytest.raises(UserError, match="run `speculators extract` again"):
        cache.read("ab12", IDS)


def test_a_cache_from_before_tokenizers_were_recorded_is_read(cache, verifier):
    manifest = json.loads((cache.path / "manifest.json").read_text())
    del manifest["tokenizer_hash"]
    write_json(cache.path / "manifest.json", manifest)
    assert HiddenStateCache.open(cache.path, verifier, (4,)).aux_layer_ids == (4,)


def test_a_changed_byte_is_found_in_the_first_samples_read_and_in_all_on_demand(cache, verifier):
    cache.write("ab12", states())
    bad = bytearray(cache.file("ab12").read_bytes())
    bad[-1] ^= 1  # still finite: only the checksum can tell
    for check_all, reads in ((False, 0), (True, 0), (True, NUM_CHECKED)):
        opened = HiddenStateCache.open(cache.path, verifier, None, check_all)
        cache.file("ab12").unlink()
        cache.write("ab12", states())
        for _ in range(reads):
            opened.read("ab12", IDS)
        cache.file("ab12").write_bytes(bad)
        with pytest.raises(UserError, match=r"ab12\.safetensors: truncated or damaged \(its checksum"):
            opened.read("ab12", IDS)


def test_a_sample_without_a_checksum_is_read_and_said_so_once(cache, verifier, capsys):
    cache.write("ab12", states())
    for file in (cache.path / "index").iterdir():
        file.unlink()
    opened = HiddenStateCache.open(cache.path, verifier, None)
    for _ in range(3):
        assert torch.equal(opened.read("ab12", IDS).ids, states().ids)
    assert capsys.readouterr().err.count("ab12, and perhaps others, has no checksum") == 1
    assert HiddenStateCache.open(cache.path, verifier, None).index_again(["ab12"]) == []
    HiddenStateCache.open(cache.path, verifier, None).read("ab12", IDS)
    assert capsys.readouterr().err == ""


def test_indexing_again_names_what_is_damaged_and_does_not_vouch_for_it(cache):
    for name in ("ab12", "cd34"):
        cache.write(name, states())
    for file in (cache.path / "index").iterdir():
        file.unlink()
    cache.file("cd34").write_bytes(cache.file("cd34").read_bytes()[:-1])
    again = HiddenStateCache.create(cache.path, cache.manifest)
    assert again.index_again(["ab12", "cd34"]) == ["cd34"]
    assert again.index.without_line(["ab12", "cd34"]) == ["cd34"]


def test_the_two_ways_of_storing_are_never_mixed_or_misread(cache, verifier, tmp_path):
    cache.write("ab12", states())
    stores = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}
    own = stores.pop(cache.manifest.dtype)
    (other,) = stores.values()
    with pytest.raises(UserError, match=f"--store: .* one cache is stored in one way; .* --store {own}"):
        HiddenStateCache.create(cache.path, CacheManifest.of(verifier, LAYERS, other))
    stranger = HiddenStateCache.create(tmp_path / "other", CacheManifest.of(verifier, LAYERS, other))
    stranger.file("ab12").parent.mkdir()
    stranger.file("ab12").write_bytes(cache.file("ab12").read_bytes())
    with pytest.raises(UserError, match=r"truncated or damaged .*hidden"):
        stranger.read("ab12", IDS)


def test_a_format_that_is_not_known_is_refused(cache, verifier):
    for changed in ({"format_version": 3}, {"dtype": "float16"}, {"format_version": 3, "dtype": "int4"}):
        manifest = json.loads(cache.manifest.model_dump_json())
        write_json(cache.path / "manifest.json", {**manifest, **changed})
        with pytest.raises(UserError, match=r"this version reads 1 \(bfloat16\), 2 \(float8_e4m3fn\)"):
            HiddenStateCache.open(cache.path, verifier, None)


def test_the_plan_of_a_token_is_what_it_takes_on_the_disk(cache):
    cache.write("ab12", states())
    cache.write("cd34", states(length=107))
    more = cache.file("cd34").stat().st_size - cache.file("ab12").stat().st_size
    assert abs(more - 100 * cache.manifest.token_bytes) < 64


def test_scales_that_do_not_fit_are_damage(verifier, tmp_path):
    cache = HiddenStateCache.create(tmp_path / "hs", CacheManifest.of(verifier, LAYERS, "fp8"))
    cache.write("ab12", states())
    tensors = load_file(cache.file("ab12"))
    save_file({**tensors, "last_hidden_scale": tensors["last_hidden_scale"][:1].clone()}, cache.file("ab12"))
    (tmp_path / "hs" / "index").rename(tmp_path / "gone")
    with pytest.raises(UserError, match=r"truncated or damaged .scales of shape"):
        HiddenStateCache.open(cache.path, verifier, None).read("ab12", IDS)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_sentence_and_leaves_what_is_whole(cache, monkeypatch, number):
    cache.write("ab12", states())
    write = Path.write_bytes

    def full(path, content):
        write(path, content[: len(content) // 2])
        raise OSError(number, "No room")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match=r"hs: the disk is full \(No room\); .* whole and stay"):
        cache.write("cd34", states())
    monkeypatch.undo()
    assert "cd34" not in cache
    assert not list(cache.path.glob("**/.*"))
    assert torch.equal(cache.read("ab12", IDS).ids, states().ids)
    cache.write("cd34", states())
    assert torch.equal(cache.read("cd34", IDS).ids, states().ids)

"""The cache refuses what it was not made for, and names a bad file instead of training on it."""

import numpy as np
import pytest
import torch
from tiny import H, tiny_verifier

from speculators.data.hidden_states import CacheManifest, HiddenStateCache, HiddenStates
from speculators.errors import UserError

LAYERS = (2, 4, 5)
IDS = np.arange(7, dtype=np.int32)


@pytest.fixture
def verifier(tmp_path):
    return tiny_verifier(tmp_path / "v")


@pytest.fixture
def cache(verifier, tmp_path):
    return HiddenStateCache.create(tmp_path / "hs", CacheManifest.of(verifier, LAYERS))


def states(seed=0, length=len(IDS)):
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(length, len(LAYERS), H, generator=generator).bfloat16()
    return HiddenStates(torch.arange(length).int(), aux, torch.randn(length, H, generator=generator).bfloat16())


def test_what_is_written_is_read_back_layer_by_layer(cache, verifier):
    cache.write("ab12", states())
    for layers in (LAYERS, (5,), (2, 5)):
        got = HiddenStateCache.open(cache.path, verifier, layers).read("ab12", IDS)
        assert torch.equal(got.aux_hidden, states().aux_hidden[:, [LAYERS.index(k) for k in layers]])
        assert torch.equal(got.last_hidden, states().last_hidden)


def test_layers_that_were_not_cached_are_refused(cache, verifier):
    with pytest.raises(UserError, match=r"holds layers \[2, 4, 5\], the run asks for \[2, 6\]"):
        HiddenStateCache.open(cache.path, verifier, (2, 6))


def test_another_verifier_and_another_template_are_refused(cache, verifier):
    for field, what in (("revision", "verifier"), ("template_hash", "chat template")):
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

"""`extract --verify`: equal states pass, eight bits pass, and one wrong token of one layer does not."""

import json
import sys
from pathlib import Path

import pytest
import torch
from data_directories import random_samples, write_samples
from unruly_server import UnrulyServer

from speculators.cli.extract import run
from speculators.data.extract_local import LocalSource
from speculators.data.extract_options import LEAST_COSINE, ExtractOptions
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.samples import DataDirectory
from speculators.data.verify_states import choose, verify
from speculators.verifier import Verifier

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from tiny_models import write_tiny_verifier

LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny verifier with weights, five samples, and a cache in either store that transformers filled."""
    place = tmp_path_factory.mktemp("verify")
    verifier = Verifier.read(write_tiny_verifier(place / "verifier"))
    samples = random_samples(verifier.vocab_size, (5, 9, 3, 20, 7))
    write_samples(place / "data", verifier, {"train": samples}, max_length=32)
    return place


def options(place, **changed):
    given = {"verifier": str(place / "verifier"), "data": place / "data", "output": place / "bf16", "source": "local"}
    return ExtractOptions(**{**given, "aux_layer_ids": LAYERS, "json_output": True, "verify": 4, **changed})


def extracted(capsys, asked):
    run(asked)
    return json.loads(capsys.readouterr().out)


def test_what_was_just_extracted_agrees_in_either_store(place, capsys):
    exact = extracted(capsys, options(place))
    rounded = extracted(capsys, options(place, store="fp8", output=place / "fp8"))
    assert exact["extracted"] == rounded["extracted"] == 5
    assert exact["size_bytes"] - 5 * 4096 > 1.8 * (rounded["size_bytes"] - 5 * 4096)
    for summary, largest in ((exact, 0.0), (rounded, 1 / 28 + 2**-8)):
        found = summary["verification"]
        assert found["samples"] == 4
        assert [layer["layer"] for layer in found["layers"]] == ["2", "4", "5", "last"]
        assert all(layer["largest_relative_error"] <= largest for layer in found["layers"])
        assert all(layer["lowest_cosine"] > 0.999 for layer in found["layers"])


def test_one_wrong_token_of_one_layer_is_found_and_the_command_ends_with_one(place, capsys):
    extracted(capsys, options(place, output=place / "bad", verify=None))
    verifier = Verifier.read(place / "verifier")
    cache = HiddenStateCache.open(place / "bad", verifier, None)
    sample = min(DataDirectory(place / "data").split("train"), key=lambda s: s.sample_id)
    states = cache.read(sample.sample_id, sample.ids)
    states.aux_hidden[1, 2] = states.aux_hidden[1, 1]
    cache.write(sample.sample_id, states)
    with pytest.raises(SystemExit) as ended:
        run(options(place, output=place / "bad", verify=1, json_output=False))
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert f"has to be {LEAST_COSINE} or more, NOT every one is" in out
    found = verify(cache, [sample], LocalSource(verifier, LAYERS))
    assert [layer.lowest_cosine >= LEAST_COSINE for layer in found.layers] == [True, True, False, True]


def test_of_several_servers_the_one_with_other_layers_is_named(place, capsys):
    verifier = Verifier.read(place / "verifier")

    def server_of(layers):
        compute = LocalSource(verifier, layers)

        def states_of(ids):
            states = compute("", torch.tensor(ids).numpy())
            return torch.cat([states.aux_hidden, states.last_hidden[:, None]], 1)

        return UnrulyServer(place / "storage", states_of)

    (place / "storage").mkdir()
    with server_of(LAYERS) as right, server_of((3, 4, 5)) as wrong:
        asked = options(
            place, output=place / "two", source="vllm", endpoint=(right.url, wrong.url), storage_path=place / "storage",
            verify=2, concurrency=1,
        )  # fmt: skip
        with pytest.raises(SystemExit):
            run(asked)
    found = json.loads(capsys.readouterr().out)["verification"]
    assert found["samples"] == 2
    (differing,) = found["differing"]
    assert differing.endswith(f"(from {wrong.url})")


def test_samples_to_verify_come_from_every_server_and_from_what_was_there():
    samples = random_samples(50, range(3, 33))
    named = sorted(sample.sample_id for sample in samples)
    answered_by = {name: "ab"[i < 25] for i, name in enumerate(named[:28])}
    servers = [answered_by.get(sample.sample_id) for sample in choose(samples, 9, answered_by)]
    assert {name: servers.count(name) for name in ("a", "b", None)} == {"a": 3, "b": 4, None: 2}
    assert len(choose(samples, 1, answered_by)) == 3
    assert [sample.sample_id for sample in choose(samples, 4, {})] == named[:4]


def test_the_noise_of_bfloat16_passes_and_the_next_layers_stream_does_not(place, capsys):
    extracted(capsys, options(place))
    verifier = Verifier.read(place / "verifier")
    cache = HiddenStateCache.open(place / "bf16", verifier, None)
    samples = list(DataDirectory(place / "data").split("train"))
    precise = LocalSource(verifier, LAYERS)
    precise._decoder.float()
    found = verify(cache, samples, precise)
    assert found.passed
    assert all(0 < layer.largest_relative_error < 0.1 for layer in found.layers)
    shifted = verify(cache, samples, LocalSource(verifier, (3, 5, 6)))
    assert [layer.lowest_cosine >= LEAST_COSINE for layer in shifted.layers] == [False, False, False, True]
    assert torch.tensor([layer.mean_cosine for layer in shifted.layers]).max() <= 1.0001

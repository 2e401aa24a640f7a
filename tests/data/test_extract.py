import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_directories import random_samples, write_samples
from extraction_server import HIDDEN, ExtractionServer, streams_of

from speculators.data.endpoints import Endpoints
from speculators.data.extract import extract, plan
from speculators.data.extract_options import ExtractOptions
from speculators.data.extract_rest import RestSource
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.samples import DataDirectory
from speculators.errors import UserError
from speculators.schema import write_json
from speculators.verifier import Verifier

LAYERS = (1, 3, 4)


@pytest.fixture
def place(tmp_path):
    """A verifier (config only), its data directory of six samples, and an empty storage directory."""
    config = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2) | {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_hidden_layers": 6,
        "vocab_size": 64,
        "max_position_embeddings": 40,
        "rms_norm_eps": 1e-5,
    }
    write_json(tmp_path / "verifier" / "config.json", config)
    verifier = Verifier.read(tmp_path / "verifier")
    write_data(tmp_path / "data", verifier, lengths=(5, 9, 3, 20, 7, 12))
    (tmp_path / "storage").mkdir()
    return tmp_path


def write_data(path, verifier, lengths):
    samples = random_samples(64, lengths)
    # The first sample is in both splits: it must be extracted once.
    splits = {"train": samples[:-1], "validation": [samples[-1], samples[0]]}
    write_samples(path, verifier, splits, max_length=32)
    return samples


def options(place, **changed):
    given = {
        "verifier": str(place / "verifier"),
        "data": place / "data",
        "output": place / "hs",
        "aux_layer_ids": LAYERS,
    }
    return ExtractOptions(**{**given, **changed})


def source(*servers, place, attempts=5):
    sources = [
        RestSource(getattr(server, "url", server), place / "storage", len(LAYERS), HIDDEN, timeout_s=5.0)
        for server in servers
    ]
    return Endpoints(sources, attempts, 0.05, say=lambda line: None, first_pause_s=0.001)


def test_every_sample_is_fetched_once_and_stored_as_the_server_gave_it(place):
    with ExtractionServer(place / "storage", len(LAYERS) + 1) as server:
        summary = extract(plan(options(place)), source(server, place=place), concurrency=3)
    assert (summary.samples, summary.extracted, summary.tokens, len(server.requests)) == (6, 6, 56, 6)
    assert list((place / "storage").iterdir()) == []
    cache = HiddenStateCache.open(place / "hs", Verifier.read(place / "verifier"), LAYERS)
    for sample in DataDirectory(place / "data").split("train"):
        states = cache.read(sample.sample_id, sample.ids)
        wanted = streams_of(sample.ids.tolist(), len(LAYERS) + 1)
        assert torch.equal(states.aux_hidden, wanted[:, :-1])
        assert torch.equal(states.last_hidden, wanted[:, -1])


def test_a_second_extraction_does_only_what_is_missing(place):
    with ExtractionServer(place / "storage", len(LAYERS) + 1) as server:
        made = plan(options(place))
        extract(made, source(server, place=place))
        gone = made.missing[2]
        made.cache.file(gone.sample_id).unlink()
        again = plan(options(place))
        assert [sample.sample_id for sample in again.missing] == [gone.sample_id]
        extract(again, source(server, place=place))
        assert server.requests[6:] == [gone.ids.tolist()]
    assert plan(options(place)).missing == []


def test_a_lasting_failure_names_endpoint_sample_and_last_answer_and_keeps_what_is_done(place):
    def tamper(number, tensors, answer):
        answer["detail"] = f"out of luck {number}"
        return 500 if number > 2 else None

    with ExtractionServer(place / "storage", len(LAYERS) + 1, tamper) as server:
        made = plan(options(place))
        third = made.missing[2]
        with pytest.raises(UserError, match=rf"{server.url}: .*{third.sample_id} \(3 tokens\).*500.*out of luck 7"):
            extract(made, source(server, place=place))
    assert len(plan(options(place)).missing) == 4
    assert not list((place / "hs").glob("*/.*"))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda n, t, a: t.update(token_ids=t["token_ids"] + 1), "expected .* streams of the tokens sent"),
        (lambda n, t, a: t.update(hidden_states=t["hidden_states"][:, 1:].contiguous()), "came back as .*, expected"),
        (lambda n, t, a: t.update(hidden_states=t["hidden_states"][1:]), "came back as .*, expected"),
        (lambda n, t, a: t["hidden_states"].__setitem__((1, 0, 0), float("nan")), "aux_hidden is not finite .*token 1"),
        (
            lambda n, t, a: t["hidden_states"].__setitem__((1, 3, 0), float("inf")),
            "last_hidden is not finite .*token 1",
        ),
        (lambda n, t, a: a.clear(), "names no hidden states; start it with `speculators serve VERIFIER"),
        (lambda n, t, a: 400, "refused sample"),
    ],
)
def test_answers_that_are_not_these_tokens_states_are_never_stored(place, tamper, message):
    def change(number, tensors, answer):
        status = tamper(number, tensors, answer)
        return status if isinstance(status, int) else None

    with ExtractionServer(place / "storage", len(LAYERS) + 1, change) as server:
        with pytest.raises(UserError, match=message):
            extract(plan(options(place)), source(server, place=place))
        assert len(server.requests) in (1, 5)
    assert len(plan(options(place)).missing) == 6


def test_a_file_outside_the_storage_directory_is_neither_read_nor_deleted(place):
    precious = place / "precious.safetensors"
    precious.write_text("keep me")

    for named in (precious, place / "storage" / ".." / precious.name):

        def tamper(number, tensors, answer, named=named):
            answer["kv_transfer_params"]["hidden_states_path"] = str(named)

        outside = pytest.raises(UserError, match=r"--storage-path: .* outside")
        with ExtractionServer(place / "storage", len(LAYERS) + 1, tamper) as server, outside:
            extract(plan(options(place)), source(server, place=place))
    assert precious.read_text() == "keep me"


def test_an_unreachable_server_is_named(place):
    words = r"http://127.0.0.1:1: .* sample .* nothing answered for 0.05 s; .* ConnectionError.*same command continues"
    with pytest.raises(UserError, match=words):
        extract(plan(options(place)), source("http://127.0.0.1:1", place=place))


def test_what_does_not_fit_on_the_disk_is_refused_before_anything_is_fetched(place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(256 << 20) + 1000))
    with pytest.raises(UserError, match=r"--output: .*hs has 0.25 GiB free, the hidden states need"):
        plan(options(place))


def test_a_cache_of_other_layers_or_another_verifier_is_refused(place):
    plan(options(place))
    with pytest.raises(UserError, match=r"holds layers \[1, 3, 4\], asked for \[1, 2\]|asks for \[1, 2\]"):
        plan(options(place, aux_layer_ids=(1, 2)))
    with pytest.raises(UserError, match=r"--aux-layer-ids: 3,1 is not allowed; give ascending ids from 0 to 5"):
        plan(options(place, aux_layer_ids=(3, 1)))
    with pytest.raises(UserError, match=r"--verifier: /no/such is not a directory"):
        plan(options(place, verifier="/no/such"))


def test_samples_that_leave_no_room_for_an_answer_are_refused(place):
    write_data(place / "data", Verifier.read(place / "verifier"), lengths=(5, 40))
    with pytest.raises(UserError, match=r"a sample of 40 tokens, .* takes fewer than 40"):
        plan(options(place))


def test_the_local_source_gives_the_streams_entering_layers_and_the_one_before_the_final_norm(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from speculators.data.extract_local import LocalSource

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, vocab_size=50, eos_token_id=2
    )
    made = LlamaForCausalLM(config)
    made.model.norm.weight.data.uniform_(0.5, 2)
    made.bfloat16().save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    ids = np.arange(11, dtype=np.int32)
    states = LocalSource(Verifier.read(tmp_path / "model"), (1, 2))("x", ids)
    entering: dict[int, torch.Tensor] = {}
    for n, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda _, inputs, n=n: entering.update({n: inputs[0][0]}))
    with torch.no_grad():
        last = model.model(torch.arange(11)[None]).last_hidden_state[0]
        assert torch.equal(model.model.norm(states.last_hidden), last)
    assert torch.equal(states.aux_hidden, torch.stack([entering[1], entering[2]], dim=1))
    assert states.ids.tolist() == ids.tolist()


def test_shards_fill_one_cache_between_them_and_write_over_nothing(place):
    done = []
    with ExtractionServer(place / "storage", len(LAYERS) + 1) as server:
        for i in range(3):
            made = plan(options(place, shard=f"{i + 1}/3"))
            done.append({sample.sample_id for sample in made.missing})
            assert extract(made, source(server, place=place)).samples == len(done[-1])
        assert len(server.requests) == 6
    assert sum(map(len, done)) == len(set.union(*done)) == 6
    assert plan(options(place)).missing == []
    assert len(list((place / "hs" / "index").iterdir())) == sum(map(bool, done))


def test_several_servers_share_the_samples(place):
    lengths = (5, 9, 3, 20, 7, 12)
    layers = len(LAYERS) + 1
    for name in "ab":
        (place / "storage" / name).mkdir()
    with (
        ExtractionServer(place / "storage" / "a", layers) as a,
        ExtractionServer(place / "storage" / "b", layers) as b,
    ):
        extract(plan(options(place)), source(a, b, place=place))
        asked = [sum(map(len, server.requests)) for server in (a, b)]
    assert sum(asked) == sum(lengths)
    assert abs(asked[0] - asked[1]) <= max(lengths)


def test_stored_samples_without_a_line_in_the_index_get_one_and_damaged_ones_are_fetched_again(place, capsys):
    with ExtractionServer(place / "storage", len(LAYERS) + 1) as server:
        made = plan(options(place))
        extract(made, source(server, place=place))
        for file in (place / "hs" / "index").iterdir():
            file.unlink()
        bad = made.missing[3]
        made.cache.file(bad.sample_id).write_bytes(b"half a file")
        again = plan(options(place))
        assert "6 stored samples are not in the index" in capsys.readouterr().err
        assert [sample.sample_id for sample in again.missing] == [bad.sample_id]
        extract(again, source(server, place=place))
        assert server.requests[6:] == [bad.ids.tolist()]
    capsys.readouterr()
    third = plan(options(place))
    assert (third.missing, capsys.readouterr().err) == ([], "")
    for sample in DataDirectory(place / "data").split("train"):
        assert third.cache.index.entry(sample.sample_id).tokens == len(sample.ids)


def test_a_disk_that_fills_up_stops_the_run_with_what_is_whole(place, monkeypatch):
    written, write = [], Path.write_bytes

    def full(path, content):
        written.append(path)
        if len(written) > 2:
            write(path, content[:40])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    with ExtractionServer(place / "storage", len(LAYERS) + 1) as server:
        made = plan(options(place))
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match=r"hs: the disk is full \(No space left on device\)"):
            extract(made, source(server, place=place), concurrency=3)
        monkeypatch.undo()
        assert len(plan(options(place)).missing) == 4
        assert not list((place / "hs").glob("**/.*"))
        assert extract(plan(options(place)), source(server, place=place)).extracted == 4

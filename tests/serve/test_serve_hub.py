"""Hub ids, with the hub's own cache laid out on disk and no network: what is read, passed on, and refused."""

import json

import huggingface_hub.constants as hub_constants
import pytest
from fake_vllm import environment
from tiny_models import write_models

from serve.options import ServeOptions, spec_of
from speculators.errors import UserError

COMMIT = "0" * 40


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    write_models(root, "dflash")
    environment(root / "vllm")
    environment(root / "old", "0.17.1")
    return root


@pytest.fixture
def cache(place, tmp_path, monkeypatch):
    """A function that puts the config of a directory into the hub's cache under a hub id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def put(model, config):
        repository = tmp_path / "cache" / f"models--{model.replace('/', '--')}"
        (repository / "snapshots" / COMMIT).mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        (repository / "snapshots" / COMMIT / "config.json").write_text(json.dumps(config))

    config = json.loads((place / "dflash" / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "someone/verifier"
    put("someone/verifier-speculator.dflash", config)
    put("someone/verifier", json.loads((place / "verifier" / "config.json").read_text()))
    put("someone/half", {"speculators_model_type": "dflash", "speculators_config": {}})
    return put


def spec(place, model, vllm="vllm", **options):
    return spec_of(ServeOptions(model=model, vllm=str(place / vllm), port=8200, **options))


def test_a_draft_on_the_hub_is_served_by_its_name_and_told_by_its_config(place, cache):
    made = spec(place, "someone/verifier-speculator.dflash", vllm_args=("--max-model-len", "4096"))
    assert made.command[3] == "someone/verifier-speculator.dflash"
    assert not any("speculative" in word for word in made.command)
    told = dict(made.summary())
    assert (told["verifier"], told["draft"]) == ("someone/verifier", "someone/verifier-speculator.dflash")
    assert (told["algorithm"], told["speculative tokens"], told["context"]) == ("dflash", "7", "4096 tokens")
    assert "HF_HUB_OFFLINE" not in made.environment


def test_another_verifier_or_k_goes_into_a_speculative_config_and_the_hub_stays_reachable(place, cache):
    draft = "someone/verifier-speculator.dflash"
    made = spec(place, draft, verifier=str(place / "verifier"), num_speculative_tokens=3)
    assert made.command[3] == str(place / "verifier")
    said = json.loads(made.command[made.command.index("--speculative-config") + 1])
    assert said == {"model": draft, "method": "dflash", "num_speculative_tokens": 3}
    assert "HF_HUB_OFFLINE" not in made.environment, "the draft is still to be fetched"
    alone = spec(place, draft, speculation=False)
    assert (alone.command[3], alone.draft) == ("someone/verifier", None)


def test_a_plain_model_on_the_hub_is_passed_on(place, cache):
    made = spec(place, "someone/verifier")
    assert (made.command[3], made.draft, made.algorithm) == ("someone/verifier", None, None)


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ("someone/else", {}, "someone/else: the hub cannot be reached from here and it is not in the cache"),
        ("someone/half", {}, "someone/half: its config.json is not complete"),
        ("someone/verifier-speculator.dflash", {"num_speculative_tokens": 8}, "8 is not possible for .* 1 to 7"),
        ("someone/verifier-speculator.dflash", {"num_speculative_tokens": 0}, "0 is not possible"),
        ("someone/verifier-speculator.dflash", {"num_speculative_tokens": "auto"}, "auto needs a bench report"),
        ("someone/verifier-speculator.dflash", {"verifier": "/no/such"}, "/no/such: neither a directory nor a hub id"),
        ("someone/verifier-speculator.dflash", {"vllm": "old"}, r"0.17.1 .* too old for dflash drafts"),
        ("someone/verifier-speculator.dflash", {"method": "ngram"}, "--method: .* is a draft"),
        ("someone/verifier", {"num_speculative_tokens": 3}, "someone/verifier is not a draft"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts_and_nothing_is_written(
    place, cache, tmp_path, model, options, sentence
):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=sentence):
        spec(place, model, **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_hub_that_refuses_connections_is_given_up_at_once(place, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_constants, "ENDPOINT", "http://127.0.0.1:1")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="someone/else: the hub cannot be reached from here"):
        spec(place, "someone/else")
    assert sorted(tmp_path.rglob("*")) == before
    assert spec(place, "someone/verifier-speculator.dflash").num_speculative_tokens == 7, "it is in the cache"

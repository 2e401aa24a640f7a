"""Facts read from a verifier's files, and what makes two verifiers different."""

import json
from pathlib import Path

import pytest
from tiny import tiny_verifier

from speculators.errors import UserError
from speculators.verifier import Verifier


def test_sizes_norm_and_caps_come_from_the_config(tmp_path):
    plain = tiny_verifier(tmp_path / "a")
    assert (plain.num_layers, plain.hidden_size, plain.num_kv_heads, plain.head_dim) == (8, 16, 2, 8)
    assert (plain.norm_kind, plain.final_softcap, plain.logit_scale) == ("plain", None, 1.0)
    gemma = tiny_verifier(tmp_path / "b", model_type="gemma2", final_logit_softcapping=30.0)
    assert (gemma.norm_kind, gemma.final_softcap) == ("one_plus", 30.0)
    granite = tiny_verifier(tmp_path / "c", model_type="granite", logits_scaling=8.0)
    assert granite.logit_scale == 1 / 8


def test_of_several_kinds_of_layers_a_draft_rotates_as_those_that_see_everything(tmp_path):
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": full}
    verifier = tiny_verifier(tmp_path, rope_parameters=kinds)
    assert verifier.rope_parameters == full


def test_older_rope_keys_are_read_as_todays(tmp_path):
    changes = {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    verifier = tiny_verifier(tmp_path / "v", **changes)
    assert verifier.rope_parameters == {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.0}


def test_a_multimodal_config_is_read_through_its_text_part(tmp_path):
    inner = json.loads((Path(tiny_verifier(tmp_path / "a").path) / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": {**inner, "model_type": "gemma3_text"}}
    (tmp_path / "a" / "config.json").write_text(json.dumps(outer))
    assert Verifier.read(tmp_path / "a").norm_kind == "one_plus"


def test_other_weights_and_another_template_are_told_apart_whatever_the_path(tmp_path):
    first, copy = tiny_verifier(tmp_path / "a"), tiny_verifier(tmp_path / "b")
    assert first.revision == copy.revision
    weights = tmp_path / "b" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages }}")
    other = Verifier.read(tmp_path / "b")
    assert other.revision != first.revision
    assert other.template_hash != first.template_hash


def test_another_vocabulary_is_told_apart_and_a_copy_is_not(tmp_path):
    first = tiny_verifier(tmp_path / "a")
    assert first.tokenizer_hash == "none"
    seen = set()
    for name, text in (("vocab.json", "{}"), ("merges.txt", "a b"), ("merges.txt", "a c"), ("tokenizer.json", "{}")):
        (tmp_path / "a" / name).write_text(text)
        seen.add(Verifier.read(tmp_path / "a").tokenizer_hash)
    assert len(seen) == 4
    tiny_verifier(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages }}")
    assert Verifier.read(tmp_path / "b").tokenizer_hash == Verifier.read(tmp_path / "a").tokenizer_hash
    assert Verifier.read(tmp_path / "b").revision == first.revision


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "mamba"}, "family 'mamba'.*known families"),
        ({"speculators_model_type": "eagle3"}, "holds a draft"),
        ({"model_type": "llama"}, "is missing"),
    ],
)
def test_what_cannot_be_a_known_verifier_is_refused_in_a_sentence(tmp_path, config, sentence):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=sentence):
        Verifier.read(tmp_path)


@pytest.mark.parametrize(
    ("layers", "ids"), [(30, (2, 15, 27)), (7, (2, 3, 4)), (6, (2, 3)), (4, (1, 2)), (2, (0, 1)), (1, (0,))]
)
def test_the_layers_that_feed_a_draft_are_distinct_and_inside_the_verifier(tmp_path, layers, ids):
    verifier = tiny_verifier(tmp_path, num_hidden_layers=layers)
    assert verifier.default_aux_layer_ids() == ids

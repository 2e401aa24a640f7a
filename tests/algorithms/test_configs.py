"""Configs of drafts: what vLLM reads is there, and what could not work is refused before training."""

import json
from types import SimpleNamespace

import pytest
from tiny import tiny_draft, tiny_verifier

from speculators.algorithms import lookup
from speculators.algorithms.dflash import mask_token
from speculators.errors import UserError
from speculators.training.options import TrainOptions


def options(verifier, algorithm, **changes):
    fixed = {"verifier": verifier.path, "data": "d", "hidden_states": "h", "output": "o", "draft_vocab_size": 24}
    return TrainOptions(**{**fixed, "speculator_type": algorithm, **changes})


def test_dflash_is_served_as_bidirectional_as_it_was_trained(tmp_path):
    config = tiny_draft(tiny_verifier(tmp_path / "v"), "dflash", block_size=6).config.to_json()
    assert config["sliding_window_non_causal"] is True
    assert config["sample_from_anchor"] is False
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["transformer_layer_config"]["model_type"] == "qwen3"


def test_eagle3_proposes_as_many_tokens_as_it_was_unrolled(tmp_path):
    config = tiny_draft(tiny_verifier(tmp_path / "v"), "eagle3", ttt_steps=5).config.to_json()
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is False, "vLLM takes true when the key is missing"


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_the_config_says_the_verifiers_vocabulary_rope_and_revision(tmp_path, algorithm):
    rope = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
    verifier = tiny_verifier(tmp_path / "v", rope_parameters=rope)
    config = json.loads(json.dumps(tiny_draft(verifier, algorithm).config.to_json()))
    assert config["transformer_layer_config"]["vocab_size"] == 40
    assert config["transformer_layer_config"]["rope_parameters"] == rope
    assert config["draft_vocab_size"] == 24
    assert config["speculators_config"]["verifier"]["revision"] == verifier.revision


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused(tmp_path, algorithm):
    verifier = tiny_verifier(tmp_path / "v")
    with pytest.raises(
        UserError, match="--draft-vocab-size: 41 is more than the verifier's vocabulary; allowed are 1 to 40"
    ):
        lookup(algorithm).config.from_options(verifier, options(verifier, algorithm, draft_vocab_size=41), (2, 4, 5))


def test_an_unknown_algorithm_lists_the_known_ones():
    with pytest.raises(UserError, match="unknown algorithm 'medusa'; known algorithms are eagle3, dflash"):
        lookup("medusa")


@pytest.mark.parametrize("token", [0, 1, 2])
def test_pad_bos_and_eos_are_no_mask_tokens(tmp_path, token):
    verifier = tiny_verifier(tmp_path / "v")
    with pytest.raises(UserError, match=f"--mask-token-id: {token} is the verifier's pad, EOS or BOS token"):
        lookup("dflash").config.from_options(verifier, options(verifier, "dflash", mask_token_id=token), (2, 4, 5))


def test_a_mask_token_outside_the_vocabulary_is_refused(tmp_path):
    verifier = tiny_verifier(tmp_path / "v")
    with pytest.raises(UserError, match="outside the verifier's vocabulary; allowed are 0 to 39"):
        mask_token.choose(verifier, 40)


class Tokens(SimpleNamespace):
    def __len__(self):
        return self.size


def token(content, special=True):
    return SimpleNamespace(content=content, special=special)


def test_the_chosen_mask_token_is_special_unused_and_not_in_the_template(tmp_path):
    verifier = tiny_verifier(tmp_path / "v")
    added = {
        0: token("<pad>"),
        2: token("</s>"),
        5: token("<user>"),
        6: token("<spare>"),
        9: token("word", special=False),
    }
    tokens = Tokens(all_special_ids=[0, 1, 2], added_tokens_decoder=added, chat_template="<user>{{x}}", size=30)
    verifier.__dict__["tokenizer"] = tokens
    assert mask_token.choose(verifier, None) == 6
    tokens.added_tokens_decoder = {0: token("<pad>")}
    assert mask_token.choose(verifier, None) == 30, "the first embedding row that no token has"
    tokens.size = 40
    with pytest.raises(UserError, match="no unused special token"):
        mask_token.choose(verifier, None)

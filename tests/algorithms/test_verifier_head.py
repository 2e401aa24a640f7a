"""The frozen ends against transformers' own logits, on tiny random models of several families."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from speculators.algorithms.verifier_head import VerifierHead
from speculators.errors import UserError
from speculators.verifier import Verifier

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {},
    "phi3": {},
    "granite": {"logits_scaling": 6.0, "tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3_text": {"final_logit_softcapping": 7.0},
}


def random_model(family, path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms of random weights would hide whether they scale by w or by 1 + w.
            parameter.copy_(torch.randn_like(parameter) * (0.5 if "norm" in name else 0.3) + ("norm" in name) * 0.7)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_are_the_verifiers_own_logits(family, tmp_path):
    model = random_model(family, tmp_path)
    before_norm = []
    model.get_decoder().norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    with torch.no_grad():
        logits = model(torch.arange(3, 20)[None]).logits[0]
    ids = torch.tensor([0, 2, 3, 17, 40, 59])
    head = VerifierHead(Verifier.read(tmp_path), ids, dtype=torch.float32)
    got = head.verifier_logits(head.normalize(before_norm[0][0]))
    torch.testing.assert_close(got, logits[:, ids], atol=2e-4, rtol=1e-4)


def test_a_model_directory_without_its_head_is_refused(tmp_path):
    random_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no tensor embed_tokens\.weight"):
        VerifierHead(Verifier.read(tmp_path), torch.arange(60))

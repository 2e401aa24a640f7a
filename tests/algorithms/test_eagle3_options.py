"""The eagle3 options that vLLM reads, against a slow chain over one document as `llama_eagle3.py` runs it."""

import math

import pytest
import torch
from tiny import document_of, tiny_draft, tiny_row, tiny_verifier

from speculators import checkpoint

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CASES = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_before_fc": True, "fc_norm": True},
    {"norm_output": True},
    {"num_layers": 3},
    {"num_layers": 2, **dict.fromkeys(FLAGS, True)},
]


def rotate(x, position):
    half = x.shape[-1] // 2
    angle = position * 10000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def norm(x, weight):
    return x / (x.pow(2).mean() + 1e-5).sqrt() * weight


class Slow:
    """The draft of `draft.config`, one slot at a time, with the keys and values of every layer so far."""

    def __init__(self, draft):
        self.c = draft.config
        self.w = {name.removesuffix(".weight"): t.float() for name, t in draft.module.state_dict().items()}
        self.embedding, self.head = draft.head.embedding_VH.float(), draft.head.output_DH.float()
        self.ids = draft.draft_token_ids

    def feature(self, aux_AH):
        flat = aux_AH.float().flatten()
        if self.c.norm_before_fc:
            flat = norm(flat, self.w["input_norm"])
        if self.c.fc_norm:
            flat = torch.cat([norm(part, self.w[f"fc_norm.{i}"]) for i, part in enumerate(flat.chunk(len(aux_AH)))])
        return self.w["fc"] @ flat

    def slot(self, token, hidden, position, cache):
        """(state after the final norm, what the next step reads); extends the cache of each layer in place."""
        stream = hidden
        for n in range(self.c.num_layers):
            p = f"layers.{n}."
            if n == 0:
                normed = norm(hidden, self.w[p + "hidden_norm"])
                stream = normed if self.c.norm_before_residual else hidden
                x = torch.cat([norm(self.embedding[token], self.w[p + "input_layernorm"]), normed])
            else:
                x = norm(stream, self.w[p + "input_layernorm"])
            q, k, v = ((self.w[f"{p}self_attn.{name}_proj"] @ x).view(-1, 8) for name in "qkv")
            cache[n].append((rotate(k, position), v))
            q = rotate(q, position)
            out = []
            for h in range(4):
                scores = torch.stack([k[h // 2] @ q[h] for k, _ in cache[n]]) / math.sqrt(8)
                out.append(torch.softmax(scores, 0) @ torch.stack([v[h // 2] for _, v in cache[n]]))
            stream = stream + self.w[p + "self_attn.o_proj"] @ torch.cat(out)
            x = norm(stream, self.w[p + "post_attention_layernorm"])
            gate, up, down = (self.w[f"{p}mlp.{name}_proj"] for name in ("gate", "up", "down"))
            stream = stream + down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
        normed = norm(stream, self.w["norm"])
        return normed, normed if self.c.norm_output else stream

    def draft(self, document, t, steps):
        """Tokens proposed once the token at t has been emitted."""
        cache = [[] for _ in range(self.c.num_layers)]
        for s in range(t):
            normed, fed_back = self.slot(document.ids[s + 1], self.feature(document.aux_hidden[s]), s, cache)
        proposed = []
        for step in range(steps):
            proposed.append(int(self.ids[(self.head @ normed).argmax()]))
            normed, fed_back = self.slot(proposed[-1], fed_back, t + step, cache)
        return proposed


def draft_of(tmp_path, **options):
    draft = tiny_draft(tiny_verifier(tmp_path / "v"), "eagle3", **options)
    draft.head.output_DH, draft.head.embedding_VH = draft.head.output_DH.float(), draft.head.embedding_VH.float()
    return draft


@pytest.mark.parametrize("options", CASES, ids=lambda o: "+".join(o) or "plain")
def test_the_chain_is_the_one_that_is_served(tmp_path, options):
    draft = draft_of(tmp_path, **options)
    document = document_of(tiny_row(lengths=(9,)), 0)
    slow = Slow(draft)
    for t in (3, 5):
        proposed = slow.draft(document, t, 3)
        ids = document.ids.clone()
        ids[t + 1 : t + 4] = torch.tensor(proposed)
        assert draft.accepted_from_every_position(document._replace(ids=ids))[t] == 3
        wrong = ids.clone()
        wrong[t + 2] = (wrong[t + 2] + 1) % 40
        assert draft.accepted_from_every_position(document._replace(ids=wrong))[t] == 1


@pytest.mark.parametrize("options", CASES, ids=lambda o: "+".join(o) or "plain")
def test_every_option_comes_back_from_disk_and_trains_every_weight(tmp_path, options):
    draft = draft_of(tmp_path, **options)
    draft.step(tiny_row(), torch.Generator().manual_seed(0)).loss_sum.backward()
    assert [name for name, p in draft.module.named_parameters() if p.grad is None or not p.grad.any()] == []
    checkpoint.write(tmp_path / "d", draft.config.to_json(), draft.checkpoint_tensors())
    config = checkpoint.read_config(tmp_path / "d")
    assert config == draft.config
    assert {name for name in FLAGS if getattr(config, name)} == {name for name in FLAGS if options.get(name)}
    checkpoint.check_tensors(tmp_path / "d", config)


def test_the_layer_config_says_for_how_many_features_fc_is_made(tmp_path):
    config = draft_of(tmp_path).config
    assert config.to_json()["transformer_layer_config"]["num_aux_hidden_states"] == 3
    two = config.model_copy(update={"aux_layer_ids": (1, 2)})
    assert two.to_json()["transformer_layer_config"]["num_aux_hidden_states"] == 2

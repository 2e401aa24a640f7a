"""What each slot sees and predicts, against a slow simulation of serving: one document, draft and query at a time."""

import math

import pytest
import torch
from tiny import document_of, tiny_draft, tiny_row, tiny_verifier


@pytest.fixture
def verifier(tmp_path):
    return tiny_verifier(tmp_path / "v")


def rotate(x, position, theta=10000.0):
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def heads(x):
    return x.view(-1, 8)


def attend(q, keys, values):
    """One query [heads, size] over lists of keys and values [kv heads, size]."""
    out = []
    for h in range(len(q)):
        shared = h // 2
        scores = torch.stack([k[shared] @ q[h] for k in keys]) / math.sqrt(8)
        out.append(torch.softmax(scores, 0) @ torch.stack([v[shared] for v in values]))
    return torch.cat(out)


def mlp(w, prefix, x):
    gate, up, down = (w[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))


class ServedEagle3:
    """vLLM's chain over one document: context slots from the verifier's states, then the draft's own output."""

    def __init__(self, draft):
        self.w = {name: t.float() for name, t in draft.module.state_dict().items()}
        self.embedding, self.head = draft.head.embedding_VH.float(), draft.head.output_DH.float()
        self.ids = draft.draft_token_ids

    def slot(self, embedding, hidden, position, keys, values):
        w, p = self.w, "layers.0."
        x = torch.cat([norm(embedding, w[p + "input_layernorm.weight"]), norm(hidden, w[p + "hidden_norm.weight"])])
        q, k, v = (heads(w[f"{p}self_attn.{name}_proj.weight"] @ x) for name in "qkv")
        keys, values = [*keys, rotate(k, position)], [*values, v]
        stream = hidden + w[p + "self_attn.o_proj.weight"] @ attend(rotate(q, position), keys, values)
        stream = stream + mlp(w, p, norm(stream, w[p + "post_attention_layernorm.weight"]))
        return stream, keys, values

    def draft(self, document, t, steps):
        """Tokens proposed once the token at t has been emitted."""
        keys, values = [], []
        for s in range(t):
            hidden = self.w["fc.weight"] @ document.aux_hidden[s].float().flatten()
            stream, keys, values = self.slot(self.embedding[document.ids[s + 1]], hidden, s, keys, values)
        proposed = []
        for step in range(steps):
            proposed.append(int(self.ids[(self.head @ norm(stream, self.w["norm.weight"])).argmax()]))
            position = t + step
            stream, keys, values = self.slot(self.embedding[proposed[-1]], stream, position, keys, values)
        return proposed


class ServedDFlash:
    """vLLM's block over one document: injected context before the anchor, the anchor's token, then mask tokens."""

    def __init__(self, draft):
        self.w = {name: t.float() for name, t in draft.module.state_dict().items()}
        self.embedding, self.head = draft.head.embedding_VH.float(), draft.head.output_DH.float()
        self.ids, self.mask = draft.draft_token_ids, draft.config.mask_token_id

    def draft(self, document, t, steps):
        w = self.w
        context = [
            norm(w["fc.weight"] @ document.aux_hidden[s].float().flatten(), w["hidden_norm.weight"]) for s in range(t)
        ]
        stream = [self.embedding[i] for i in [int(document.ids[t])] + [self.mask] * steps]
        for n in range(2):
            p = f"layers.{n}."
            x = [norm(s, w[p + "input_layernorm.weight"]) for s in stream]

            def project(name, row, p=p):
                return heads(w[f"{p}self_attn.{name}_proj.weight"] @ row)

            def key(row, at, p=p):
                return rotate(norm(project("k", row), w[p + "self_attn.k_norm.weight"]), at)

            keys = [key(c, s) for s, c in enumerate(context)] + [key(row, t + s) for s, row in enumerate(x)]
            values = [project("v", row) for row in [*context, *x]]
            for s in range(len(stream)):
                q = rotate(norm(project("q", x[s]), w[p + "self_attn.q_norm.weight"]), t + s)
                stream[s] = stream[s] + w[p + "self_attn.o_proj.weight"] @ attend(q, keys, values)
                stream[s] = stream[s] + mlp(w, p, norm(stream[s], w[p + "post_attention_layernorm.weight"]))
        return [int(self.ids[(self.head @ norm(s, w["norm.weight"])).argmax()]) for s in stream[1:]]


CASES = [("eagle3", ServedEagle3, {"ttt_steps": 3}), ("dflash", ServedDFlash, {"block_size": 4})]


@pytest.mark.parametrize(("name", "served", "options"), CASES, ids=[c[0] for c in CASES])
def test_training_predicts_what_serving_drafts_at_every_position(verifier, name, served, options):
    draft = tiny_draft(verifier, name, **options)
    draft.head.output_DH, draft.head.embedding_VH = draft.head.output_DH.float(), draft.head.embedding_VH.float()
    batch = tiny_row(lengths=(7, 10))
    server = served(draft)
    K = draft.config.num_speculative_tokens
    # Let the text be what the draft proposes at some places, or nothing would ever be accepted.
    ids = batch.ids.clone()
    for number, at in ((0, 3), (1, 4), (1, 7)):
        document = document_of(batch._replace(ids=ids), number)
        first = int((batch.document_ids == number).nonzero()[0])
        proposed = server.draft(document, at, K)[: len(document.ids) - at - 1]
        ids[first + at + 1 : first + at + 1 + len(proposed)] = torch.tensor(proposed)
    batch = batch._replace(ids=ids)

    got = draft.accepted_from_every_position(batch)
    seen = []
    for number in range(2):
        document = document_of(batch, number)
        first = int((batch.document_ids == number).nonzero()[0])
        for t in range(1, len(document.ids) - 1):
            accepted = 0
            for proposed, real in zip(server.draft(document, t, K), document.ids[t + 1 :].tolist(), strict=False):
                if proposed != real:
                    break
                accepted += 1
            assert got[first + t] == accepted, f"document {number}, position {t}"
            seen.append(accepted)
    assert max(seen) >= 2, "the case proves nothing unless drafts are accepted"


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_packing_changes_nothing(verifier, name):
    draft = tiny_draft(verifier, name)
    batch = tiny_row(lengths=(9, 12, 11))
    steps = [
        draft.step(b, torch.Generator().manual_seed(0)) for b in (batch, *(document_of(batch, n) for n in range(3)))
    ]
    together, alone = steps[0], steps[1:]
    assert together.num_targets == sum(s.num_targets for s in alone) > 0
    torch.testing.assert_close(together.loss_sum, sum(s.loss_sum for s in alone), rtol=2e-3, atol=1e-2)
    assert torch.equal(together.histogram, sum(s.histogram for s in alone))


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_draft_never_sees_what_comes_after_it(verifier, name):
    draft = tiny_draft(verifier, name)
    batch, t = tiny_row(lengths=(14,)), 6
    changed = batch._replace(aux_hidden=batch.aux_hidden.clone(), ids=batch.ids.clone())
    # The state at t belongs to the token just emitted: the verifier has not computed it when drafting starts.
    changed.aux_hidden[t:] += 3
    changed.ids[t + 5 :] = (changed.ids[t + 5 :] + 1) % 40
    K = draft.config.num_speculative_tokens
    before, after = draft.accepted_from_every_position(batch), draft.accepted_from_every_position(changed)
    assert torch.equal(before[: t + 4 - K].clamp(max=4), after[: t + 4 - K].clamp(max=4))
    assert before[t].clamp(max=4) == after[t].clamp(max=4)


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_targets_outside_the_draft_vocabulary_are_rejected_and_carry_no_gradient(verifier, name):
    draft = tiny_draft(verifier, name)
    batch = tiny_row(lengths=(12,))
    outside = batch._replace(ids=torch.full_like(batch.ids, 39))
    step = draft.step(outside, torch.Generator().manual_seed(0))
    step.loss_sum.backward()
    assert step.num_targets == 0
    assert step.histogram[1:].sum() == 0
    assert step.histogram[0] > 0
    assert all(p.grad is None or not p.grad.any() for p in draft.module.parameters())

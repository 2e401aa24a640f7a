"""Sliding windows and a learned mask embedding: what is seen, what is trained, what vLLM finds on disk."""

import json
import math

import pytest
import torch
from test_attention import inputs, slow_attention
from tiny import tiny_draft, tiny_row, tiny_verifier

from speculators import checkpoint
from speculators.algorithms import attention
from speculators.algorithms.attention import grouped_attention, visible
from speculators.algorithms.dflash.objective import reach
from speculators.errors import UserError

WINDOWED = {
    "blocks of two documents": (6, 4, 4, [0, 0, 0, 9, 9, 9], [2, 7, 9, 9, 12, 15], 5),
    "window of the block's size": (4, 3, 3, [0, 0, 0, 0], [1, 6, 11, 14], 3),
    "window beyond the context": (3, 2, 2, [0, 0, 0], [3, 6, 9], 40),
}


def windowed(window):
    """The slow loop's predicate with a window, query by query."""

    def attend(q, k, v, k_own, v_own, start, limit):
        parts = []
        for b in range(q.shape[1]):
            # A query's own low end as its group's start gives the plain loop.
            low = torch.maximum(start, limit + b - window + 1)
            parts.append(slow_attention(q[:, b : b + 1], k, v, k_own, v_own, low, limit))
        return torch.cat(parts, dim=1)

    return attend


@pytest.mark.parametrize("name", WINDOWED)
def test_pieces_under_a_window_equal_the_slow_loop_in_values_and_gradients(name):
    G, B, M, start, limit, window = WINDOWED[name]
    tensors = inputs(G, B, M, T=16)
    start, limit = torch.tensor(start), torch.tensor(limit)
    fast, slow = grouped_attention(*tensors, start, limit, window), windowed(window)(*tensors, start, limit)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(fast.shape, generator=torch.Generator().manual_seed(1))
    for got, wanted in zip(
        torch.autograd.grad(fast, tensors, upstream), torch.autograd.grad(slow, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_chunks_of_windows_join_without_a_seam():
    G, B = 60, 4
    tensors = inputs(G, B, B, T=G)
    start, limit = torch.where(torch.arange(G) < 35, 0, 35), torch.arange(G)
    fast = grouped_attention(*tensors, start, limit, 6)
    torch.testing.assert_close(fast, windowed(6)(*tensors, start, limit), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", WINDOWED)
def test_flex_attention_has_the_same_window(name, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    G, B, M, start, limit, window = WINDOWED[name]
    start, limit = torch.tensor(start), torch.tensor(limit)
    tensors = [t.detach() for t in inputs(G, B, M, T=16)]
    pieces = grouped_attention(*tensors, start, limit, window)
    torch.testing.assert_close(attention._flex(*tensors, start, limit, window), pieces, atol=1e-5, rtol=1e-5)


def test_a_slot_sees_a_window_of_positions_that_ends_at_its_own():
    start, limit, window = torch.tensor([0]), torch.tensor([10]), 6
    for slot in range(4):
        seen = visible(torch.tensor(0), torch.arange(16), start, limit, 12, 4, slot, window).nonzero()[:, 0].tolist()
        position = 10 + slot
        assert seen == [*range(position - window + 1, 10), 12, 13, 14, 15], "context by distance, its block whole"


def reached(draft, batch, t):
    """Context rows whose features change what is predicted at the anchor t."""
    anchor, documents = torch.tensor([t]), torch.tensor([0])

    def outputs(aux):
        embeds = draft.ends.embed(torch.full((1, draft.config.block_size), 7))
        return draft.module(aux, batch.positions, embeds, documents, anchor)

    with torch.no_grad():
        before, rows = outputs(batch.aux_hidden), []
        for row in range(len(batch.ids)):
            aux = batch.aux_hidden.clone()
            aux[row] += 3
            if not torch.allclose(outputs(aux), before, atol=1e-6):
                rows.append(row)
    return rows


def test_a_sliding_draft_reads_only_the_last_context(tmp_path):
    verifier = tiny_verifier(tmp_path / "v")
    batch = tiny_row(lengths=(14,))
    assert reached(tiny_draft(verifier, "dflash", block_size=4), batch, 10) == list(range(10))
    assert reached(tiny_draft(verifier, "dflash", block_size=4, sliding_window=6), batch, 10) == list(range(5, 10))


def test_vllm_finds_the_window_in_the_layer_config(tmp_path):
    draft = tiny_draft(tiny_verifier(tmp_path / "v"), "dflash", block_size=4, sliding_window=6, num_layers=3)
    checkpoint.write(tmp_path / "d", draft.config.to_json(), draft.checkpoint_tensors())
    layer = json.loads((tmp_path / "d" / "config.json").read_text())["transformer_layer_config"]
    assert (layer["layer_types"], layer["sliding_window"]) == (["sliding_attention"] * 3, 6)
    assert checkpoint.read_config(tmp_path / "d") == draft.config


def test_a_window_that_cuts_the_block_is_refused(tmp_path):
    with pytest.raises(UserError, match="--sliding-window: 3 is less than --block-size 4"):
        tiny_draft(tiny_verifier(tmp_path / "v"), "dflash", block_size=4, sliding_window=3)


def test_the_learned_mask_embedding_is_trained_and_lies_where_vllm_looks(tmp_path):
    draft = tiny_draft(tiny_verifier(tmp_path / "v"), "dflash", block_size=4, learn_mask_embedding=True)
    draft.step(tiny_row(), torch.Generator().manual_seed(0)).loss_sum.backward()
    assert draft.module.mask_embedding.grad.any()
    checkpoint.write(tmp_path / "d", draft.config.to_json(), draft.checkpoint_tensors())
    state = torch.load(tmp_path / "d" / "mask_embedding.pt", weights_only=True)
    assert state["mask_token_id"] == 7
    assert torch.equal(state["embedding"], draft.module.mask_embedding.detach().bfloat16())
    assert "mask_embedding" not in checkpoint.read_header(tmp_path / "d" / "model.safetensors"), "ignored there"
    config = checkpoint.read_config(tmp_path / "d")
    assert config == draft.config
    checkpoint.check_tensors(tmp_path / "d", config)
    before = draft.module.mask_embedding.detach().bfloat16().float()
    draft.module.mask_embedding.data.zero_()
    draft.load_tensors(checkpoint.read_tensors(tmp_path / "d"))
    assert torch.equal(draft.module.mask_embedding.detach(), before)
    (tmp_path / "d" / "mask_embedding.pt").unlink()
    with pytest.raises(UserError, match=r"mask_embedding.pt: no such file"):
        checkpoint.check_tensors(tmp_path / "d", checkpoint.read_config(tmp_path / "d"))


def test_a_learned_mask_embedding_starts_as_the_mask_tokens(tmp_path):
    verifier = tiny_verifier(tmp_path / "v")
    plain = tiny_draft(verifier, "dflash", block_size=4)
    learned = type(plain).build(
        plain.config.model_copy(update={"learn_mask_embedding": True}), verifier, plain.vocab, plain.options
    )
    state = {**plain.module.state_dict(), "mask_embedding": learned.module.mask_embedding.detach()}
    learned.module.load_state_dict(state)
    batch = tiny_row()
    losses = [d.step(batch, torch.Generator().manual_seed(0)).loss_sum for d in (plain, learned)]
    torch.testing.assert_close(*losses)


def test_a_slots_weight_is_the_smoothed_chance_of_getting_there():
    """Against a slow loop; a target outside the draft vocabulary is never proposed, so its chance is 0."""
    block, slot = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 0, 2, 1, 2])  # block 0 lacks slot 1
    chance = torch.tensor([0.5, 0.9, 0.25, 0.8, 0.1])
    got = reach(block, slot, torch.zeros(2, 3), 0.2, chance)
    table = {(b, s): c for b, s, c in zip(block.tolist(), slot.tolist(), chance.tolist(), strict=True)}
    wanted = [
        math.prod(0.8 * table.get((b, before), 0.0) + 0.2 for before in range(s))
        for b, s in zip(block.tolist(), slot.tolist(), strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(wanted))


def test_dpace_trains_and_weighs_late_slots_less_than_sure_ones(tmp_path):
    losses = {}
    for weights, alpha in (("dpace", 1.0), ("dpace", 0.0), ("fixed-exp-decay", 0.5)):
        draft = tiny_draft(tiny_verifier(tmp_path / "v"), "dflash", position_weights=weights, dpace_alpha=alpha)
        output = draft.step(tiny_row(), torch.Generator().manual_seed(0))
        output.loss_sum.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in draft.module.parameters())
        losses[weights, alpha] = output.loss_sum.item()
    assert losses["dpace", 0.0] < losses["fixed-exp-decay", 0.5] < losses["dpace", 1.0]

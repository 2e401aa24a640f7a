"""Filling up changes shapes alone: the spare rows are seen by nothing and count for nothing."""

import pytest
import torch
from tiny import tiny_draft, tiny_row, tiny_verifier

from speculators.algorithms import row_shapes
from speculators.algorithms.row_shapes import ROW_MULTIPLE, fill_up, repeat_last


@pytest.mark.parametrize(("count", "filled"), [(0, 0), (1, ROW_MULTIPLE), (ROW_MULTIPLE, ROW_MULTIPLE), (70, 128)])
def test_rows_are_repeated_up_to_the_multiple(count, filled):
    rows = torch.arange(count * 3).reshape(count, 3)
    wide = repeat_last(rows)
    assert len(wide) == filled
    assert torch.equal(wide[:count], rows)
    assert bool((wide[count:] == rows[-1:]).all())


def test_the_spare_tokens_are_a_document_of_their_own_without_targets():
    row = tiny_row()
    filled = fill_up(row)
    count = len(row.ids)
    assert len(filled.ids) % ROW_MULTIPLE == 0
    assert all(torch.equal(x[:count], y) for x, y in zip(filled[:-1], row[:-1], strict=True))
    assert not filled.loss_mask[count:].any()
    assert set(filled.document_ids[count:].tolist()) == {int(row.document_ids[-1]) + 1}
    assert filled.sample_ids == row.sample_ids


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_step_is_the_same_with_and_without_spare_rows(tmp_path, algorithm, monkeypatch):
    outputs = []
    for multiple in (1, 64):
        monkeypatch.setattr(row_shapes, "ROW_MULTIPLE", multiple)
        draft = tiny_draft(tiny_verifier(tmp_path / "v"), algorithm)
        output = draft.step(tiny_row(), torch.Generator().manual_seed(0))
        output.loss_sum.backward()
        outputs.append((output, [p.grad for p in draft.module.parameters()]))
    (plain, grads), (filled, filled_grads) = outputs
    assert (plain.num_targets, plain.metrics) == (filled.num_targets, filled.metrics)
    assert torch.equal(plain.histogram, filled.histogram)
    torch.testing.assert_close(plain.loss_sum, filled.loss_sum, rtol=1e-4, atol=1e-4)
    for one, other in zip(grads, filled_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)

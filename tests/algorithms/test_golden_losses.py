"""Loss curves of both algorithms on a tiny fixed problem, pinned: a change of formula must show itself here."""

import pytest
import torch
from tiny import tiny_draft, tiny_row, tiny_verifier

GOLDEN = {
    "eagle3": [5.17945, 4.23915, 4.27258, 3.78937, 3.42849, 3.46788],
    "dflash": [4.59543, 3.42162, 2.83658, 2.63412, 2.41455, 2.25889],
}


def losses_of(draft):
    optimizer = torch.optim.SGD(draft.module.parameters(), lr=0.02)
    rows = [tiny_row(lengths=(11, 14), seed=seed) for seed in (0, 1)]
    curve = []
    for step in range(6):
        optimizer.zero_grad()
        output = draft.step(rows[step % 2], torch.Generator().manual_seed(step))
        (output.loss_sum / output.num_targets).backward()
        optimizer.step()
        curve.append(output.loss_sum.item() / output.num_targets)
    return curve


@pytest.mark.parametrize("name", GOLDEN)
def test_the_loss_curve_is_the_golden_one(tmp_path, name):
    draft = tiny_draft(tiny_verifier(tmp_path / "v"), name, loss_fn='{"kl_div": 0.8, "ce": 0.1, "tv": 0.1}')
    draft.head.output_DH, draft.head.embedding_VH = draft.head.output_DH.float(), draft.head.embedding_VH.float()
    assert losses_of(draft) == pytest.approx(GOLDEN[name], rel=1e-4)

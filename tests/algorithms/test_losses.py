"""The chunked loss and its hand-made gradient against autograd over plain formulas, one row at a time."""

import pytest
import torch
from tiny import D, H, tiny_verifier, tiny_vocab

from speculators.algorithms import losses
from speculators.algorithms.losses import LossMix, Rows, distillation_loss, greedy_tokens
from speculators.algorithms.verifier_head import VerifierHead

MIXES = [LossMix(1, 0, 0), LossMix(0, 1, 0), LossMix(0, 0, 1), LossMix(0.3, 0.5, 0.7)]


@pytest.fixture
def head(tmp_path):
    ids = torch.from_numpy(tiny_vocab().t2d.nonzero()[0])
    return VerifierHead(tiny_verifier(tmp_path / "v"), ids, dtype=torch.float32)


def slow_loss(rows, normed, head, mix):
    total = torch.zeros((), dtype=torch.float64)
    for x in range(len(rows.hidden)):
        q = torch.softmax(head.output_DH.double() @ rows.hidden[x].double(), 0)
        p = torch.softmax(head.output_DH.double() @ normed[rows.position[x]].double(), 0)
        ce, kl, tv = -q[rows.target[x]].log(), (p * (p / q).log()).sum(), (p - q).abs().sum() / 2
        total = total + rows.weight[x].double() * (mix.ce * ce + mix.kl_div * kl + mix.tv * tv)
    return total


def rows_of(count, positions, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        hidden=torch.randn(count, H, generator=generator, requires_grad=True),
        position=torch.randint(0, positions, (count,), generator=generator).sort().values,
        target=torch.randint(0, D, (count,), generator=generator),
        weight=torch.rand(count, generator=generator),
    )


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_loss_and_gradient_equal_autograd_over_the_formulas(head, mix, monkeypatch):
    monkeypatch.setattr(losses, "_CHUNK_ROWS", 4)
    rows, normed = rows_of(11, 5), torch.randn(5, H, generator=torch.Generator().manual_seed(3))
    loss, correct = distillation_loss(rows, normed, head, mix)
    wanted = slow_loss(rows, normed, head, mix)
    torch.testing.assert_close(loss, wanted.float(), atol=1e-4, rtol=1e-5)
    (got,) = torch.autograd.grad(loss * 3, rows.hidden)
    (exact,) = torch.autograd.grad(wanted * 3, rows.hidden)
    torch.testing.assert_close(got, exact, atol=1e-4, rtol=1e-4)
    assert torch.equal(correct, greedy_tokens(rows.hidden, head) == rows.target)


def test_no_rows_is_a_loss_of_zero_with_a_gradient(head):
    rows = rows_of(0, 1)
    loss, correct = distillation_loss(rows, torch.zeros(1, H), head, LossMix())
    loss.backward()
    assert (loss.item(), len(correct)) == (0.0, 0)


def test_a_draft_equal_to_the_verifier_has_no_kl_and_no_tv(head):
    normed = torch.randn(6, H, generator=torch.Generator().manual_seed(5))
    rows = Rows(normed.clone().requires_grad_(), torch.arange(6), torch.zeros(6, dtype=torch.long), torch.ones(6))
    for mix in (LossMix(0, 1, 0), LossMix(0, 0, 1)):
        loss, _ = distillation_loss(rows, normed, head, mix)
        assert abs(loss.item()) < 1e-4


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_reweighed_rows_equal_rows_of_those_weights(head, mix, monkeypatch):
    monkeypatch.setattr(losses, "_CHUNK_ROWS", 4)
    rows, normed = rows_of(11, 5), torch.randn(5, H, generator=torch.Generator().manual_seed(3))
    seen = []

    def reweigh(chance):
        seen.append(chance)
        return chance**2 + 0.1

    loss, _ = distillation_loss(rows, normed, head, mix, reweigh)
    q = torch.softmax(rows.hidden.detach() @ head.output_DH.T, dim=-1)
    exact = q.gather(1, rows.target[:, None])[:, 0]
    torch.testing.assert_close(seen[0], exact, atol=1e-6, rtol=1e-4)
    wanted, _ = distillation_loss(rows._replace(weight=rows.weight * (exact**2 + 0.1)), normed, head, mix)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-4)
    got, fixed = (torch.autograd.grad(x, rows.hidden)[0] for x in (loss, wanted))
    torch.testing.assert_close(got, fixed, atol=1e-5, rtol=1e-4)

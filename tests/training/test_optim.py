"""Learning rates over the steps, and which optimizer takes which parameter."""

import pytest
import torch
from torch import nn

from speculators.training.optim import Hyper, Optimizers, lr_factor


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("total", [1, 2, 10, 1000])
def test_the_rate_rises_then_never_rises_again_and_stays_positive(schedule: str, total: int):
    factors = [lr_factor(step, total, 0.1, schedule) for step in range(total)]  # type: ignore[arg-type]
    peak = factors.index(max(factors))
    assert peak <= 0.1 * total + 1
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors)
    assert schedule != "constant" or factors[-1] == 1
    assert schedule == "constant" or total < 1000 or factors[-1] < 0.03


def module() -> nn.Module:
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(6, 5), nn.RMSNorm(5), nn.Linear(5, 4, bias=False))
    built[2].weight.requires_grad_(False)
    return built


def test_muon_takes_the_matrices_adamw_the_rest_frozen_ones_nobody():
    built = module()
    optimizers = Optimizers(built.parameters(), Hyper("muon", 0.1, 0.01, 0.0))
    muon, adamw = optimizers._optimizers
    assert [p.shape for g in muon.param_groups for p in g["params"]] == [(5, 6)]
    assert [p.shape for g in adamw.param_groups for p in g["params"]] == [(5,), (5,)]


def test_adamw_steps_as_written_in_its_paper_and_decays_matrices_only():
    """Slow loop: arXiv 1711.05101, algorithm 2."""
    built, lr, decay, (b1, b2), eps = module(), 0.1, 0.3, (0.9, 0.95), 1e-8
    parameters = [p for p in built.parameters() if p.requires_grad]
    optimizers = Optimizers(built.parameters(), Hyper("adamw", lr, 0.0, decay))
    expected = [p.detach().double() for p in parameters]
    first, second = [torch.zeros_like(p) for p in expected], [torch.zeros_like(p) for p in expected]
    for step, factor in enumerate((0.5, 1.0, 0.25), start=1):
        for i, parameter in enumerate(parameters):
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient
            first[i] = b1 * first[i] + (1 - b1) * gradient
            second[i] = b2 * second[i] + (1 - b2) * gradient.double() ** 2
            expected[i] = expected[i] * (1 - lr * factor * (decay if parameter.ndim == 2 else 0))
            corrected = first[i] / (1 - b1**step), second[i] / (1 - b2**step)
            expected[i] = expected[i] - lr * factor * corrected[0] / (corrected[1].sqrt() + eps)
        optimizers.step(factor)
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_saved_and_loaded_continues_bit_by_bit(name: str):
    def stepped(optimizers: Optimizers, built: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in built.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizers.step(0.7)

    hyper = Hyper(name, 0.1, 0.01, 0.1)  # type: ignore[arg-type]
    one = module()
    optimizers = Optimizers(one.parameters(), hyper)
    stepped(optimizers, one, 1)
    other = module()
    other.load_state_dict(one.state_dict())
    resumed = Optimizers(other.parameters(), hyper)
    resumed.load_state_tensors({key: value.clone() for key, value in optimizers.state_tensors().items()})
    stepped(optimizers, one, 2)
    stepped(resumed, other, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

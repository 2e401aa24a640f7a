"""AdamW, Muon, and the learning rate over the steps.

Muon takes the matrices and AdamW, with a learning rate of its own, the rest. The trap: optimizer state is addressed by
the order of the parameters, so that order must not depend on anything but the module.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from speculators.algorithms.draft_config import DraftConfig
from speculators.training.options import TrainOptions

Name = Literal["adamw", "muon"]
Schedule = Literal["cosine", "linear", "constant"]

# The learning rate never falls below this share of its peak: the last steps still learn.
_FLOOR = 0.02


class Hyper(NamedTuple):
    """Resolved optimizer settings."""

    optimizer: Name
    lr: float
    adamw_lr: float
    weight_decay: float


def lr_factor(step: int, total: int, warmup_share: float, schedule: Schedule) -> float:
    """Share of the peak learning rate in `step` (0 .. total - 1)."""
    warmup = int(warmup_share * total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total - warmup)
    falling = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return _FLOOR + (1 - _FLOOR) * falling


def resolve_hyper(options: TrainOptions, config: DraftConfig) -> Hyper:
    """The options, with what they leave open taken from the algorithm's recipe."""
    recipe = config.recipe
    optimizer = options.optimizer or recipe.optimizer
    return Hyper(
        optimizer=optimizer,
        lr=options.lr or (recipe.muon_lr if optimizer == "muon" else recipe.adamw_lr),
        adamw_lr=options.adamw_lr or recipe.adamw_lr,
        weight_decay=options.weight_decay,
    )


class Optimizers:
    """The one or two optimizers of a run, stepped together."""

    def __init__(self, parameters: Iterable[nn.Parameter], hyper: Hyper) -> None:
        parameters = [p for p in parameters if p.requires_grad]
        matrices = [p for p in parameters if p.ndim == 2]
        rest = [p for p in parameters if p.ndim != 2]
        self._optimizers: list[torch.optim.Optimizer] = []
        if hyper.optimizer == "muon" and matrices:
            # Updates of the size that AdamW's would have, so that one learning rate means the same for every shape.
            settings = {"weight_decay": hyper.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            self._optimizers.append(torch.optim.Muon(matrices, lr=hyper.lr, **settings))
            groups = [{"params": rest, "lr": hyper.adamw_lr, "weight_decay": 0.0}]
        else:
            groups = [
                {"params": matrices, "lr": hyper.lr, "weight_decay": hyper.weight_decay},
                {"params": rest, "lr": hyper.lr, "weight_decay": 0.0},
            ]
        groups = [group for group in groups if group["params"]]
        if groups:
            self._optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True))
        for group in self._groups():
            group["peak_lr"] = group["lr"]

    def step(self, factor: float) -> None:
        """One step at `factor` of the peak learning rates."""
        for group in self._groups():
            group["lr"] = group["peak_lr"] * factor
        for optimizer in self._optimizers:
            optimizer.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """All optimizer state, by optimizer, parameter and key."""
        return {
            f"{i}.{index}.{key}": value
            for i, optimizer in enumerate(self._optimizers)
            for index, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }

    def parameter_of(self, name: str) -> nn.Parameter:
        """The parameter that a name of `state_tensors` belongs to."""
        i, index, _ = name.split(".", 2)
        groups = self._optimizers[int(i)].param_groups
        parameter: nn.Parameter = [p for group in groups for p in group["params"]][int(index)]
        return parameter

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`; learning rates stay those of the settings."""
        for i, optimizer in enumerate(self._optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                owner, index, key = name.split(".", 2)
                if int(owner) == i:
                    state.setdefault(int(index), {})[key] = tensor
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def _groups(self) -> Iterator[dict]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

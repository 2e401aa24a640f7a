"""Sums over rows and ranks: loss, targets, tokens, accepted histogram, metrics, in one float64 vector (exact to 2^53),
so that one reduction and one transfer serve a whole step."""

from typing import NamedTuple

import torch
from torch import Tensor

from speculators.acceptance import Acceptance
from speculators.algorithms.base import Batch, Metric, StepOutput


class Summed(NamedTuple):
    """The sums on the host. `stops` counts the ranks that were asked to stop."""

    loss_sum: float
    targets: int
    tokens: int
    stops: int
    acceptance: Acceptance
    metrics: dict[str, float]

    @property
    def loss(self) -> float:
        """Mean over the targets; 0 without targets."""
        return self.loss_sum / max(1, self.targets)


class Sums:
    """Adds up rows. All rows of all ranks must name the same metrics."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._histograms: list[Tensor] = []
        self._targets = self._tokens = 0
        self._metrics: dict[str, Metric] = {}
        self._sample_ids: list[tuple[str, ...]] = []

    def add(self, output: StepOutput, batch: Batch, counted: bool) -> None:
        """Add a row; one that is not counted adds zeros."""
        weight = 1 if counted else 0
        self._sample_ids.append(batch.sample_ids)
        self._losses.append(output.loss_sum.detach() * weight)
        self._histograms.append(output.histogram * weight)
        self._targets += output.num_targets * weight
        self._tokens += len(batch.ids) * weight
        for name, metric in output.metrics.items():
            before = self._metrics.get(name, Metric(0.0, 0.0))
            self._metrics[name] = Metric(before.total + metric.total * weight, before.out_of + metric.out_of * weight)

    def vector(self, stop: bool) -> Tensor:
        """Everything as float64 [4 + 2 * metrics + K + 1]."""
        metrics = [part for name in sorted(self._metrics) for part in self._metrics[name]]
        host = torch.tensor([self._targets, self._tokens, int(stop), *metrics], dtype=torch.float64)
        loss = torch.stack(self._losses).sum(dtype=torch.float64)
        histogram = torch.stack(self._histograms).sum(0).to(loss.device, torch.float64)
        return torch.cat([loss[None], host.to(loss.device, non_blocking=True), histogram])

    def read(self, values: list[float]) -> Summed:
        """The inverse of `vector`, after it was summed over the ranks and brought to the host."""
        loss_sum, targets, tokens, stops, *rest = values
        pairs, histogram = rest[: 2 * len(self._metrics)], rest[2 * len(self._metrics) :]
        metrics = {
            name: total / count if count else float("nan")
            for name, total, count in zip(sorted(self._metrics), pairs[::2], pairs[1::2], strict=True)
        }
        return Summed(
            loss_sum,
            int(targets),
            int(tokens),
            int(stops),
            Acceptance.from_histogram([int(c) for c in histogram]),
            metrics,
        )

    def suspects(self) -> list[str]:
        """Sample ids of the rows whose loss is not finite."""
        rows = zip(self._sample_ids, self._losses, strict=True)
        return [sample_id for row, loss in rows if not torch.isfinite(loss) for sample_id in row]

    def sample_ids(self) -> list[str]:
        """Sample ids of all rows."""
        return [sample_id for row in self._sample_ids for sample_id in row]


def seeded(seed: int) -> torch.Generator:
    """The generator of one row. The global one is seeded too, so that dropout repeats after a resume as well."""
    # torch.manual_seed would keep a stack trace for every call as long as no GPU is in use.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    return torch.Generator().manual_seed(seed)

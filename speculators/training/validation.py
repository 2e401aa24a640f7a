"""Loss and acceptance on the validation split, with the same rows and random choices every time."""

import time
from collections.abc import Callable

import torch
from torch import nn

from speculators.algorithms.base import Batch, StepOutput
from speculators.data.loader import PackedRows, is_stand_in, to_device
from speculators.data.packing import RowSchedule
from speculators.training.log import ValidationRecord
from speculators.training.options import TrainOptions
from speculators.training.parallel import Ranks
from speculators.training.precision import products
from speculators.training.stop import StopRequest
from speculators.training.sums import Sums, seeded

RunRow = Callable[[Batch, torch.Generator], StepOutput]


def validate(
    module: nn.Module,
    run_row: RunRow,
    rows: PackedRows,
    options: TrainOptions,
    ranks: Ranks,
    step: int,
    stop: StopRequest,
) -> ValidationRecord | None:
    """Run all validation rows without gradients; None when a rank was asked to stop meanwhile.

    Args:
        run_row: `Algorithm.step`, possibly sharded.
    """
    started = time.perf_counter()
    schedule = RowSchedule(len(rows), 1, options.seed, ranks.rank, ranks.world, shuffle=False)
    slots = [slot for i in range(schedule.steps_per_epoch) for slot in schedule.slots(i)]
    sums = Sums()
    module.eval()
    with rows.ahead([slot.row for slot in slots]) as reader, torch.no_grad():
        for slot in slots:
            # Shards work in step, so only whole drafts may leave early.
            if stop.asked and not options.fsdp:
                break
            batch = to_device(reader.next(), ranks.device)
            with products(options.precision, ranks.device):
                counted = slot.counted and not is_stand_in(batch)
                sums.add(run_row(batch, seeded(slot.seed)), batch, counted)
    module.train()
    return _record(sums, ranks, step, stop.asked, time.perf_counter() - started)


def _record(sums: Sums, ranks: Ranks, step: int, stopped: bool, seconds: float) -> ValidationRecord | None:
    if any(ranks.gather(["stopped"] if stopped else [])):
        return None
    vector = sums.vector(stop=False)
    ranks.sum_([vector])
    total = sums.read(vector.tolist())
    return ValidationRecord.of(step, total.loss, total.acceptance, seconds, total.metrics)

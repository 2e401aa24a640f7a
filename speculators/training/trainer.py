"""The optimizer loop. It knows rows, sums and steps, and no algorithm by name.

The loss is a sum over targets; gradients are summed over rows and ranks and divided once by the global number of
targets. One transfer from the device a step carries every number that is logged or decided on.
"""

import math
import time
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from speculators.algorithms.base import Algorithm, Batch
from speculators.data.loader import PackedRows, ReadAhead, is_stand_in, to_device
from speculators.data.packing import RowSchedule
from speculators.data.skipped import read_skipped
from speculators.errors import UserError
from speculators.schema import write_json
from speculators.training.log import StepRecord, TrainLog, TrainResult, ValidationRecord, memory_bytes
from speculators.training.optim import Hyper, Optimizers, lr_factor
from speculators.training.options import TrainOptions
from speculators.training.parallel import Ranks, ShardedStep, shard_like, whole
from speculators.training.precision import products
from speculators.training.state import RunFiles, TrainingState
from speculators.training.stop import StopRequest
from speculators.training.sums import Summed, Sums, seeded
from speculators.training.trackers import Trackers
from speculators.training.validation import validate

_DEFAULT_PARTS = 4


class Trainer:
    """One run: built from scratch or from the newest checkpoint of its directory, then `run` to the end."""

    def __init__(
        self,
        algorithm: Algorithm,
        train: PackedRows,
        validation: PackedRows | None,
        options: TrainOptions,
        hyper: Hyper,
        ranks: Ranks,
    ) -> None:
        """Prepare the run; continues the checkpoints in `options.output` if there are any.

        Raises:
            UserError: those checkpoints come from other settings, data or ranks.
        """
        self.algorithm, self.options, self.hyper, self.ranks = algorithm, options, hyper, ranks
        self.files = RunFiles(options.output)
        self.step = 0
        self._train, self._validation = train, validation if options.validate_every != 0 else None
        self._schedule = RowSchedule(len(train), options.accumulate, options.seed, ranks.rank, ranks.world)
        epochs_steps = options.epochs * self._schedule.steps_per_epoch
        self.total_steps = min(epochs_steps, options.max_steps or epochs_steps)
        self._tokens = 0
        self._best_length = 0.0
        self._owes_validation = False
        self._set_up()

    def run(self) -> TrainResult:
        """Train to the last step.

        Raises:
            UserError: the loss is not finite, or a row can't be read.
            KeyboardInterrupt: asked to stop; a checkpoint was saved.
        """
        started = time.perf_counter()
        rows = (slot.row for step in range(self.step, self.total_steps) for slot in self._schedule.slots(step))
        with (
            StopRequest() as stop,
            TrainLog(self.files.run, self.step, self.total_steps, self.ranks.first, self._trackers()) as log,
            self._train.ahead(rows) as reader,
        ):
            if self._owes_validation:
                self._validate_and_save(log, stop)
            while self.step < self.total_steps:
                self._take_step(reader, log, stop)
        return self._result(time.perf_counter() - started)

    # -- one step ------------------------------------------------------------------------------------------------

    def _take_step(self, reader: ReadAhead, log: TrainLog, stop: StopRequest) -> None:
        started = time.perf_counter()
        sums, waited = self._forward_backward(reader)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        total, norm = self._reduce(sums, gradients, stop.asked)
        if not (math.isfinite(total.loss_sum) and math.isfinite(norm)):
            self._refuse_non_finite(sums, total.loss, norm)
        factor = lr_factor(self.step, self.total_steps, self.options.warmup_share, self.options.schedule)
        if total.targets:
            self._update(gradients, norm, total.targets, factor)
        else:
            log.say(
                f"step {self.step + 1}: no token of this step is a target in the draft vocabulary; nothing was learned"
            )
        for parameter in self._parameters:
            parameter.grad = None
        self.step += 1
        self._tokens += total.tokens
        log.step(self._record(total, norm, factor, time.perf_counter() - started, waited))
        if total.stops:
            self._interrupt(log)
        self._validate_and_save(log, stop)

    def _forward_backward(self, reader: ReadAhead) -> tuple[Sums, float]:
        """All of this rank's rows of the step; gives the sums and the seconds spent waiting for data."""
        sums, waited = Sums(), 0.0
        for slot in self._schedule.slots(self.step):
            asked = time.perf_counter()
            batch: Batch = reader.next()
            waited += time.perf_counter() - asked
            batch, counted = to_device(batch, self.ranks.device), slot.counted and not is_stand_in(batch)
            with products(self.options.precision, self.ranks.device):
                output = self._run_row(batch, seeded(slot.seed))
            if output.loss_sum.requires_grad:
                (output.loss_sum if counted else output.loss_sum * 0.0).backward()
            sums.add(output, batch, counted)
        return sums, waited

    def _reduce(self, sums: Sums, gradients: list[Tensor], stop: bool) -> tuple[Summed, float]:
        """Sum over ranks; gives the sums and the norm of the summed gradient (of the loss sum)."""
        vector = sums.vector(stop)
        if self.ranks.world > 1 and len(gradients) != len(self._parameters) and not self.options.fsdp:
            for parameter in self._parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients[:] = [p.grad for p in self._parameters if p.grad is not None]
        self.ranks.sum_([vector] if self.options.fsdp else [*gradients, vector])
        norm = whole(torch.nn.utils.get_total_norm(gradients)) if gradients else vector.new_zeros(())
        *values, norm_value = torch.cat([vector, norm.to(vector)[None]]).tolist()
        return sums.read(values), norm_value

    def _update(self, gradients: list[Tensor], norm: float, targets: int, factor: float) -> None:
        """The one division by the number of targets, clipping, and the optimizers' step."""
        clip = min(1.0, self.options.max_grad_norm / (norm / targets + 1e-6))
        torch._foreach_mul_(gradients, clip / targets)
        self._optimizers.step(factor)

    def _record(self, total: Summed, norm: float, factor: float, seconds: float, waited: float) -> StepRecord:
        return StepRecord(
            step=self.step,
            epoch=self.step / self._schedule.steps_per_epoch,
            loss=total.loss,
            grad_norm=norm / max(1, total.targets),
            lr=self.hyper.lr * factor,
            acceptance_length=total.acceptance.length,
            tokens=total.tokens,
            targets=total.targets,
            tokens_per_s=total.tokens / seconds,
            data_wait_share=waited / seconds,
            memory_bytes=memory_bytes(self.ranks.device),
            metrics=total.metrics,
        )

    def _refuse_non_finite(self, sums: Sums, loss: float, norm: float) -> NoReturn:
        """Write down the samples, of all ranks, and end."""
        step, last = self.step + 1, self.files.last()
        suspects = self.ranks.gather(sums.suspects()) or self.ranks.gather(sums.sample_ids())
        file = self.files.run / "non_finite.json"
        if self.ranks.first:
            write_json(file, {"step": step, "loss": str(loss), "grad_norm": str(norm), "sample_ids": suspects})
        raise UserError(
            f"step {step}: the loss is {loss} and the gradient's norm {norm}; the samples are named in {file} "
            f"(first: {suspects[0]}), the last good checkpoint is {last or 'not written yet'}; look at those samples "
            f"or lower --lr (now {self.hyper.lr:g})."
        )

    # -- between steps -------------------------------------------------------------------------------------------

    def _validate_and_save(self, log: TrainLog, stop: StopRequest) -> None:
        """What is due at this step. A validation that is the best so far is saved with its checkpoint."""
        record = None
        if self._validation and self._due(self.options.validate_every):
            record = validate(
                self.algorithm.module, self._run_row, self._validation, self.options, self.ranks, self.step, stop
            )
            if record is None:
                self._interrupt(log)
            log.validation(record)
        if record and record.acceptance_length > self._best_length:
            self._best_length = record.acceptance_length
            self._save(record, log)
        elif self._due(self.options.save_every):
            self._save(record, log)

    def _due(self, every: int | None) -> bool:
        if every is None:
            every = -(-self.total_steps // _DEFAULT_PARTS)
        return self.step == self.total_steps or (every > 0 and self.step % every == 0)

    def _interrupt(self, log: TrainLog) -> NoReturn:
        path = self._save(None, log)
        log.say(f"Stopped at step {self.step}; saved {path}. The same command continues from there.")
        raise KeyboardInterrupt

    def _save(self, validation: ValidationRecord | None, log: TrainLog) -> Path:
        """Every rank gives its shards, the first one writes."""
        log.flush()
        draft = {name: whole(t) for name, t in self.algorithm.checkpoint_tensors().items()}
        weights = {name: whole(p.detach()) for name, p in self._named_parameters()}
        optimizer = {name: whole(t) for name, t in self._optimizers.state_tensors().items()}
        state = self._state(validation)
        if self.ranks.first:
            self.files.save(state, self.algorithm.config, draft, weights, optimizer)
            self.files.choose_best()
            self.files.prune(self.options.save_total_limit)
        self.ranks.barrier()
        return self.files.path_of(self.step)

    def _result(self, seconds: float) -> TrainResult:
        best = self.files.best()
        validation = self.files.state(best).validation if best else None
        return TrainResult(
            run=str(self.files.run),
            steps=self.step,
            tokens=self._tokens,
            seconds=seconds,
            checkpoint=str(self.files.last() or ""),
            best=str(best or ""),
            validation=validation,
            skipped=len(read_skipped(self.files.run)),
        )

    # -- begin or continue -----------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        module, ranks = self.algorithm.module, self.ranks
        if self.options.restart and ranks.first:
            self.files.remove_all()
        ranks.barrier()
        self.algorithm.to(ranks.device)
        module.train()
        last = self.files.last()
        optimizer = self._load(last) if last else {}
        ranks.copy_from_first_([p.detach() for _, p in self._named_parameters()])
        if self.options.compile:
            module.compile()
        self._run_row = ShardedStep(self.algorithm, ranks) if self.options.fsdp else self.algorithm.step
        self._parameters = [p for _, p in self._named_parameters()]
        self._optimizers = Optimizers(self._parameters, self.hyper)
        like = self._optimizers.parameter_of
        self._optimizers.load_state_tensors({name: shard_like(t, like(name)) for name, t in optimizer.items()})

    def _load(self, checkpoint: Path) -> dict[str, Tensor]:
        """Continue from `checkpoint`: position and weights; gives the optimizer's state, whole."""
        state = self.files.check_continues(checkpoint, self.algorithm.config, self._state(None))
        weights, optimizer = self.files.load(checkpoint)
        for name, parameter in self._named_parameters():
            parameter.data.copy_(weights[name])
        if self.ranks.first:  # a crash may have come between a save and these
            self.files.choose_best()
            self.files.prune(self.options.save_total_limit)
        self.ranks.barrier()
        best = self.files.best()
        record = self.files.state(best).validation if best else None
        self._best_length = record.acceptance_length if record else 0.0
        self.step = state.step
        # Interrupted between the step and its validation.
        self._owes_validation = state.validation is None
        return optimizer

    def _state(self, validation: ValidationRecord | None) -> TrainingState:
        return TrainingState(
            step=self.step,
            rows_per_step=self._schedule.global_rows_per_step,
            data=self._train.fingerprint,
            settings=self.options.settings(),
            validation=validation,
        )

    def _trackers(self) -> Trackers:
        names = self.options.tracker if self.ranks.first else ()
        return Trackers.open(names, self.files.run, self.options.model_dump(mode="json"), self.step)

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.algorithm.module.named_parameters() if p.requires_grad]

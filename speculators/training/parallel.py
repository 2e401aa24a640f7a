"""One process or several under torchrun. Gradients are *summed* over ranks; who divides is the trainer, once.

Without `--fsdp` every rank holds the whole draft and the sums are plain all-reduces: drafts are small, and nothing
wraps the module. The trap: a rank that fails breaks the others' next sum, so it leaves its sentence in the store that
they met through, and they end with it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from speculators.algorithms.base import Algorithm, Batch, StepOutput
from speculators.errors import UserError

_WHY_ENDED = "why a rank ended"


class Ranks:
    """This process among all of the run."""

    def __init__(self, rank: int, world: int, device: torch.device, store: dist.Store | None = None) -> None:
        self.rank, self.world, self.device, self._store = rank, world, device, store

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and talks."""
        return self.rank == 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place."""
        if self.world > 1:
            with self._together():
                for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                    work.wait()

    def copy_from_first_(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite each tensor with the first rank's."""
        if self.world > 1:
            with self._together():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def gather(self, values: list[str]) -> list[str]:
        """All ranks' values, in the order of the ranks."""
        if self.world == 1:
            return values
        gathered: list[list[str]] = [[] for _ in range(self.world)]
        with self._together():
            dist.all_gather_object(gathered, values)
        return [value for part in gathered for value in part]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([])

    def say_why(self, error: Exception) -> None:
        """Leave this rank's reason for ending to the others; the first to say one is heard."""
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        if self._store:
            with suppress(RuntimeError):  # the rank that keeps the store has ended
                self._store.compare_set(_WHY_ENDED, "", f"rank {self.rank}: {kind}{error}")

    def why_another_ended(self) -> str:
        """The sentence of the rank that ended first; "" when none left one."""
        with suppress(RuntimeError):
            if self._store and self._store.check([_WHY_ENDED]):
                return bytes(self._store.get(_WHY_ENDED)).decode()
        return ""

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0]
            unknown = f"rank {self.rank}: another rank has ended ({reason}); its own message says why."
            raise UserError(self.why_another_ended() or unknown) from None


@contextmanager
def start_ranks(device: str) -> Iterator[Ranks]:
    """Join the other processes of a torchrun, if there is one.

    Args:
        device: auto, cpu, cuda or cuda:N; under torchrun each process takes the GPU of its local rank.

    Raises:
        UserError: the device isn't there, or another rank ended; then it is that rank's sentence.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    chosen = _device(device, int(os.environ.get("LOCAL_RANK", 0)) if world > 1 else None)
    if world == 1:
        yield Ranks(0, 1, chosen)
        return
    store, rank, world = next(dist.rendezvous("env://"))
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    ranks = Ranks(rank, world, chosen, store)
    try:
        yield ranks
    except Exception as error:
        # Shards meet inside the module too, where a lost rank is any RuntimeError.
        if isinstance(error, RuntimeError) and (why := ranks.why_another_ended()):
            raise UserError(why) from error
        ranks.say_why(error)
        raise
    # Only after success: with a rank gone this would wait for it.
    dist.destroy_process_group()


def _device(name: str, local_rank: int | None) -> torch.device:
    try:
        device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError:
        raise UserError(f"--device: unknown device {name!r}; give auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda":
        index = local_rank if local_rank is not None and device.index is None else device.index or 0
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise UserError(
                f"--device: {name} was asked for (number {index}) and torch sees {count} GPUs; give cpu or auto."
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


class ShardedStep(nn.Module):
    """FSDP2 around `algorithm.step`: weights, gradients and optimizer state are sharded between steps and whole within.

    One unit around the step, not one for each layer, because algorithms use their modules through other methods than
    `forward`, where FSDP would not gather. Gradients are summed, not averaged. Every row gives every weight a gradient,
    be it zero: ranks reduce what has one, and a row with nothing to learn would leave the others waiting.
    """

    def __init__(self, algorithm: Algorithm, ranks: Ranks) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.module = algorithm.module
        self._step = algorithm.step
        unit = fully_shard(self, mesh=init_device_mesh(ranks.device.type, (ranks.world,)))
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)

    def forward(self, batch: Batch, generator: torch.Generator) -> StepOutput:
        """One row, as `Algorithm.step`."""
        output = self._step(batch, generator)
        if not torch.is_grad_enabled():
            return output
        nothing = torch.stack([p.sum() for p in self.module.parameters() if p.requires_grad]).sum() * 0.0
        return output._replace(loss_sum=output.loss_sum + nothing)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard (every rank must ask), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The inverse of `whole` for a tensor of the parameter's shape (optimizer state); others stay as they are."""
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
    return tensor

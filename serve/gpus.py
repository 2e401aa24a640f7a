"""Total and free memory of the GPUs that vLLM would see, from `nvidia-smi`.

The trap: vLLM counts within CUDA_VISIBLE_DEVICES, `nvidia-smi` counts all, and CUDA's order is another one where the
GPUs are of different kinds. Whatever is not certain is unknown, never guessed.
"""

import os
import shutil
import subprocess
from typing import NamedTuple

_ASK = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_TIMEOUT_S = 10.0
_MIB = 1 << 20


class Gpu(NamedTuple):
    """A GPU by its number and name, and its memory."""

    number: str
    uuid: str
    total_bytes: int
    free_bytes: int


def visible_gpus() -> tuple[Gpu, ...] | None:
    """The GPUs in the order in which vLLM numbers them.

    None where that is unknown: there is no `nvidia-smi`, or it fails, or parts of GPUs or unknown names are visible.
    """
    everything = _all_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if everything is None or visible is None:
        return everything
    by_name = {gpu.number: gpu for gpu in everything} if _one_order(everything) else {}
    by_name |= {gpu.uuid: gpu for gpu in everything}
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(by_name[name] for name in names) if all(name in by_name for name in names) else None


def _all_gpus() -> tuple[Gpu, ...] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run([program, *_ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        rows = [[field.strip() for field in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
        found = tuple(Gpu(number, uuid, int(total) * _MIB, int(free) * _MIB) for number, uuid, total, free in rows)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return found or None


def _one_order(gpus: tuple[Gpu, ...]) -> bool:
    """Whether a number means the same GPU for CUDA and for `nvidia-smi`, or one that is like it."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.total_bytes for gpu in gpus}) == 1

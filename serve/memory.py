"""Does a server fit into this machine's memory? Weights (from their headers) and KV space against what is available.

For CPU builds only, where vLLM takes the whole KV space at its start and gives up after minutes when it is not there.
"""

import math
import os
from pathlib import Path

from serve.command import KV_SPACE, ServeSpec
from speculators import checkpoint
from speculators.errors import UserError

_GIB = 1 << 30
_LOADED_BYTES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
_BFLOAT16_BYTES = 2  # what wider floating-point numbers are loaded as


def check_memory(spec: ServeSpec, available_bytes: int | None = None) -> None:
    """Compare what a CPU server takes with the memory that is available now (or `available_bytes`).

    Raises:
        UserError: it does not fit; the sentence names both sums.
    """
    available = available_memory() if available_bytes is None else available_bytes
    if not spec.is_cpu or available is None:
        return
    weights = sum(weight_bytes(Path(model)) for model in (spec.verifier, spec.draft) if model)
    space = _kv_space_bytes(spec)
    if weights + space > available:
        raise UserError(
            f"{spec.model}: {weights / _GIB:.1f} GiB of weights and {space / _GIB:.1f} GiB of KV space do not fit into "
            f"the {available / _GIB:.1f} GiB of memory that are available; end other programs, or set a smaller "
            f"{KV_SPACE} (in GiB)."
        )


def weight_bytes(model: Path) -> int:
    """Memory that a local model's weights take.

    Zero for a hub id, and for a directory without safetensors files. What cannot be read is vLLM's to refuse.
    """
    total = 0
    for file in sorted(model.glob("*.safetensors")) if model.is_dir() else ():
        try:
            header = checkpoint.read_header(file)
        except UserError:
            continue
        for dtype, shape in header.values():
            total += math.prod(shape) * _LOADED_BYTES.get(dtype, _BFLOAT16_BYTES)
    return total


def available_memory() -> int | None:
    """Bytes that new programs can have: the kernel's estimate, within the control group's limit (a container's).

    None where the system does not tell.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        of_machine = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(statistics.get("inactive_file", 0))
        used = int((group / "memory.current").read_text()) - reclaimable
        return min(of_machine, max(0, int((group / "memory.max").read_text()) - used))
    except (OSError, ValueError):  # no limit ("max"), or no control groups of this kind
        return of_machine


def _kv_space_bytes(spec: ServeSpec) -> int:
    """One share for every worker; a size that the user gives by flag is left to vLLM."""
    if "kv-cache-memory-bytes" in spec.flags:
        return 0
    space = os.environ.get(KV_SPACE) or spec.environment.get(KV_SPACE, "")
    workers = spec.flags.get("tensor-parallel-size", "1")
    return int(space) * _GIB * (int(workers) if workers.isdigit() else 1) if space.isdigit() else 0

"""Does a server fit into the memory of its device? Weights (from their headers) and KV cache against what is available.

On a CPU that is the machine's memory, on GPUs what `nvidia-smi` says (unknown without it). vLLM finds out after
minutes. Refused here is only what it would refuse too, so all is counted low: one sequence's cache, no activations.
"""

import math
import os
from pathlib import Path
from typing import NamedTuple

from serve.command import KV_SPACE, ServeSpec
from serve.gpus import Gpu, visible_gpus
from speculators import checkpoint
from speculators.errors import UserError
from speculators.schema import read_json_dict

_GIB = 1 << 30
_LOADED_BYTES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
_BFLOAT16_BYTES = 2  # what wider floating-point numbers are loaded as
_SHARES_OF_GPU = (0.9, 0.92)  # vLLM's --gpu-memory-utilization when none is given: of older and newer versions
_ROUNDING = 0.99  # nvidia-smi's total is a little more than what CUDA gives away
# Every layer keeps keys and values of the whole context. Others (sliding windows, latent attention) keep less.
_FULL_ATTENTION = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "granite"})
# With these a device holds other weights than its share of the files.
_OTHER_WEIGHTS = ("quantization", "cpu-offload-gb", "enable-expert-parallel", "load-format", "hf-overrides")
_OTHER_MACHINES = ("nnodes", "distributed-executor-backend", "data-parallel-address", "data-parallel-size-local")


class Need(NamedTuple):
    """What a server takes at least: weights of one device (of all on a CPU), and the KV cache of its longest sequence
    there. Zero is unknown."""

    weights_bytes: int
    sequence_bytes: int


def check_memory(spec: ServeSpec, available_bytes: int | None = None, gpus: tuple[Gpu, ...] | None = None) -> None:
    """Compare what a server takes with the memory that is available now (or with what is given).

    Raises:
        UserError: it does not fit; the sentence names the sums.
    """
    if spec.is_cpu:
        _check_machine(spec, available_memory() if available_bytes is None else available_bytes)
    elif (found := gpus or visible_gpus()) is not None:
        _check_gpus(spec, found)


def memory_line(spec: ServeSpec) -> str:
    """What the server takes and what is there, for people."""
    need = need_of(spec)
    weights = f"{need.weights_bytes / _GIB:.1f} GiB of weights" if need.weights_bytes else "weights of unknown size"
    if spec.is_cpu:
        there = available_memory()
        available = "an unknown amount" if there is None else f"{there / _GIB:.1f} GiB"
        return f"{weights} and {_kv_space_bytes(spec) / _GIB:.1f} GiB of KV space, {available} available"
    gpus = visible_gpus()
    sequence = f", {need.sequence_bytes / _GIB:.1f} GiB of KV cache for one sequence" if need.sequence_bytes else ""
    if gpus is None:
        return f"{weights}{sequence} on each GPU; what is free there is unknown (nvidia-smi does not tell)"
    least = min((gpu.free_bytes for gpu in gpus), default=0)
    return f"{weights}{sequence} on each GPU; {least / _GIB:.1f} GiB free on the fullest of {len(gpus)}"


def need_of(spec: ServeSpec) -> Need:
    """What the server takes at least."""
    tensor, pipeline = _size(spec, "tensor-parallel-size"), _size(spec, "pipeline-parallel-size")
    verifier, draft = (weight_bytes(Path(model)) if model else 0 for model in (spec.verifier, spec.draft))
    if spec.is_cpu:
        return Need(verifier + draft, _sequence_bytes(spec) // tensor)
    if any(name in spec.flags for name in _OTHER_WEIGHTS):
        return Need(0, _sequence_bytes(spec) // (tensor * pipeline))
    return Need(verifier // (tensor * pipeline) + draft // tensor, _sequence_bytes(spec) // (tensor * pipeline))


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


def _check_machine(spec: ServeSpec, available: int | None) -> None:
    """On a CPU vLLM takes the whole KV space at its start."""
    need, space = need_of(spec), _kv_space_bytes(spec)
    if available is not None and need.weights_bytes + space > available:
        raise UserError(
            f"{spec.model}: {need.weights_bytes / _GIB:.1f} GiB of weights and {space / _GIB:.1f} GiB of KV space do "
            f"not fit into the {available / _GIB:.1f} GiB of memory that are available; end other programs, or set a "
            f"smaller {KV_SPACE} (in GiB)."
        )
    of_worker = space // _size(spec, "tensor-parallel-size")
    if space and need.sequence_bytes > of_worker:
        raise UserError(
            f"--max-model-len: the KV cache of one sequence of that length takes {need.sequence_bytes / _GIB:.1f} GiB, "
            f"{KV_SPACE} gives {of_worker / _GIB:.1f} GiB; lower --max-model-len, or set a larger {KV_SPACE}."
        )


def _check_gpus(spec: ServeSpec, gpus: tuple[Gpu, ...]) -> None:
    """vLLM takes a share of each GPU, free or not, and puts weights and KV cache into it."""
    if any(name in spec.flags for name in _OTHER_MACHINES):
        return
    kinds = ("tensor", "pipeline", "data")
    wanted = math.prod(_size(spec, f"{kind}-parallel-size") for kind in kinds)
    if wanted > len(gpus):
        raise UserError(
            f"--tensor-parallel-size: {wanted} GPUs are asked for (with pipeline and data parallelism), {len(gpus)} "
            "are visible; ask for fewer, or see CUDA_VISIBLE_DEVICES."
        )
    need = need_of(spec)
    taken = need.weights_bytes + need.sequence_bytes
    least, most = _shares_of_gpu(spec)
    for gpu in gpus[:wanted]:
        if taken > gpu.total_bytes * most:
            raise UserError(
                f"{spec.model}: {need.weights_bytes / _GIB:.1f} GiB of weights and {need.sequence_bytes / _GIB:.1f} "
                f"GiB of KV cache for one sequence do not fit into the {gpu.total_bytes * most / _GIB:.1f} GiB that "
                f"vLLM takes of GPU {gpu.number}; share the model among more with -tp, or lower --max-model-len."
            )
        if gpu.free_bytes < gpu.total_bytes * least * _ROUNDING:
            raise UserError(
                f"--gpu-memory-utilization: vLLM takes {least:.2f} of GPU {gpu.number}, "
                f"{gpu.total_bytes * least / _GIB:.1f} GiB, and {gpu.free_bytes / _GIB:.1f} GiB are free; end what "
                "else uses it, or give a smaller share."
            )


def _shares_of_gpu(spec: ServeSpec) -> tuple[float, float]:
    """The least and the largest share of a GPU's memory that vLLM may take."""
    try:
        given = float(spec.flags["gpu-memory-utilization"])
    except (KeyError, ValueError):  # not given, or vLLM's to refuse
        return _SHARES_OF_GPU
    return given, given


def _sequence_bytes(spec: ServeSpec) -> int:
    """KV cache of one sequence as long as the server takes, on one device; zero when it cannot be told."""
    file = Path(spec.verifier or "") / "config.json"
    outer = read_json_dict(file, "a Hugging Face model config") if spec.verifier and file.is_file() else {}
    config = outer.get("text_config", outer)
    asked = spec.flags.get("max-model-len")
    tokens = config.get("max_position_embeddings") if asked is None else int(asked) if asked.isdigit() else None
    windows = config.get("sliding_window") and config.get("use_sliding_window", True)
    if config.get("model_type") not in _FULL_ATTENTION or windows or not isinstance(tokens, int):
        return 0
    try:
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        element = 1 if spec.flags.get("kv-cache-dtype", "auto").startswith("fp8") else _BFLOAT16_BYTES
        return int(tokens * config["num_hidden_layers"] * 2 * heads * head_dim * element)
    except (KeyError, TypeError, ZeroDivisionError):
        return 0


def _size(spec: ServeSpec, name: str) -> int:
    """A number of devices; what is no number is vLLM's to refuse."""
    given = spec.flags.get(name, "1")
    return max(1, int(given)) if given.isdigit() else 1


def _kv_space_bytes(spec: ServeSpec) -> int:
    """One share for every worker; a size that the user gives by flag is left to vLLM."""
    if "kv-cache-memory-bytes" in spec.flags:
        return 0
    space = os.environ.get(KV_SPACE) or spec.environment.get(KV_SPACE, "")
    return int(space) * _GIB * _size(spec, "tensor-parallel-size") if space.isdigit() else 0

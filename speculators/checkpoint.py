"""A checkpoint is a directory that `vllm serve` loads as it is; training state lies in its `training/` subfolder.

A run directory holds `checkpoints/step-*/` and `best.json`, which names the best of them. A save is written beside its
final name and renamed, so a crash at any byte leaves the previous checkpoint in charge. No torch is imported here
until tensors are written.
"""

import json
import os
import shutil
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speculators.algorithms import lookup
from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.schema import Strict, read_json, read_json_dict, write_json

if TYPE_CHECKING:
    import torch

CHECKPOINTS = "checkpoints"
BEST = "best.json"
_MAX_HEADER_BYTES = 100 << 20


class Best(Strict):
    """Which checkpoint of a run is the best, by acceptance length on the validation split."""

    checkpoint: str
    step: int
    acceptance_length: float


def is_draft(path: Path) -> bool:
    """Whether `path` is a run directory or a checkpoint directory of a draft (not a plain verifier)."""
    if (path / BEST).exists() or (path / CHECKPOINTS).is_dir():
        return True
    config = path / "config.json"
    return config.exists() and "speculators_model_type" in read_json_dict(config, "a model config")


def resolve(path: Path) -> Path:
    """The checkpoint directory that `path` means: itself, or the best checkpoint of a run directory.

    Raises:
        UserError: nothing there that can be served.
    """
    if not path.exists():
        raise UserError(f"{path}: no such directory; give a run directory or a checkpoint directory.")
    if (path / BEST).exists():
        best = read_json(path / BEST, Best, "the best checkpoint's name")
        chosen = path / CHECKPOINTS / best.checkpoint
        if not chosen.is_dir():
            raise UserError(f"{path / BEST}: names {best.checkpoint}, which is not under {path / CHECKPOINTS}.")
        return chosen
    if (path / CHECKPOINTS).is_dir():
        saved = all_checkpoints(path)
        if not saved:
            raise UserError(f"{path}: a run without a checkpoint so far; train it first.")
        return saved[-1]
    if not (path / "config.json").exists():
        raise UserError(f"{path}: holds neither config.json nor a run's {BEST}; give a run or a checkpoint directory.")
    return path


def all_checkpoints(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted(p for p in (run / CHECKPOINTS).glob("step-*") if (p / "config.json").exists())


def read_config(checkpoint: Path) -> DraftConfig:
    """The typed config of a checkpoint directory.

    Raises:
        UserError: not a draft of a known algorithm, or a key that vLLM needs is missing.
    """
    file = checkpoint / "config.json"
    raw = read_json_dict(file, "a draft's config")
    if "speculators_model_type" not in raw:
        raise UserError(f"{file}: has no speculators_model_type, so it is not a draft in speculators format.")
    return lookup(str(raw["speculators_model_type"]), str(file)).config.from_json(raw, str(file))


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes from a safetensors header alone.

    Raises:
        UserError: missing, truncated or corrupt.
    """
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(stream.read(size))
        entries = {name: value for name, value in header.items() if name != "__metadata__"}
        end = max((value["data_offsets"][1] for value in entries.values()), default=0)
        if file.stat().st_size != 8 + size + end:
            raise ValueError(f"{file.stat().st_size} bytes, its header says {8 + size + end}")
        return {name: (value["dtype"], tuple(value["shape"])) for name, value in entries.items()}
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; a checkpoint needs its weights beside config.json.") from None
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: corrupt or truncated safetensors file ({error}).") from None


def check_tensors(checkpoint: Path, config: DraftConfig) -> None:
    """Compare every tensor's name and shape with the config.

    Raises:
        UserError: names the first tensor that is missing, unknown or of another shape.
    """
    file = checkpoint / "model.safetensors"
    header = read_header(file)
    wanted = config.tensor_shapes()
    for name, shape in wanted.items():
        if name not in header:
            raise UserError(f"{file}: the tensor {name} {list(shape)} is missing; config.json asks for it.")
        if header[name][1] != shape:
            raise UserError(f"{file}: {name} has shape {list(header[name][1])}, config.json asks for {list(shape)}.")
    unknown = sorted(set(header) - set(wanted) - {"embed_tokens.weight", "lm_head.weight"})
    if unknown:
        raise UserError(f"{file}: the tensor {unknown[0]} is not part of a {config.algorithm} draft with this config.")


def write(
    path: Path,
    config: dict[str, Any],
    tensors: "dict[str, torch.Tensor]",
    write_training_state: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint directory atomically: floating-point tensors as bfloat16, whole or not at all.

    Args:
        path: its final name; must not exist.
        config: what `DraftConfig.to_json` gives.
        tensors: by the names that vLLM loads.
        write_training_state: called with the `training/` directory to fill.
    """
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        (temporary / "training").mkdir(parents=True)
        on_disk = {name: t.detach().bfloat16() if t.is_floating_point() else t.detach() for name, t in tensors.items()}
        save_file({name: t.contiguous().cpu() for name, t in on_disk.items()}, temporary / "model.safetensors")
        write_json(temporary / "config.json", config)
        if write_training_state:
            write_training_state(temporary / "training")
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_tensors(checkpoint: Path) -> "dict[str, torch.Tensor]":
    """All tensors of a checkpoint."""
    from safetensors.torch import load_file

    return dict(load_file(checkpoint / "model.safetensors"))

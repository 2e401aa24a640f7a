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
# vLLM reads this one tensor from a file of its own, which it looks for by name.
MASK_EMBEDDING, MASK_EMBEDDING_FILE = "mask_embedding", "mask_embedding.pt"
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
    if (checkpoint / MASK_EMBEDDING_FILE).exists():
        raw["learn_mask_embedding"] = True
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
    found = {name: shape for name, (_, shape) in read_header(file).items()}
    wanted = config.tensor_shapes()
    if MASK_EMBEDDING in wanted and not (checkpoint / MASK_EMBEDDING_FILE).exists():
        raise UserError(
            f"{checkpoint / MASK_EMBEDDING_FILE}: no such file; config.json asks for a learned mask embedding, without "
            "it vLLM would take the verifier's."
        )
    if MASK_EMBEDDING in wanted:  # needs torch to be read, which a look at names and shapes shall not
        found[MASK_EMBEDDING] = wanted[MASK_EMBEDDING]
    check_shapes(str(file), found, config)


def check_shapes(where: str, found: dict[str, tuple[int, ...]], config: DraftConfig) -> None:
    """Compare names and shapes with the config; own embedding and output rows are allowed beyond what it asks for.

    Raises:
        UserError: names the first tensor that is missing, unknown or of another shape.
    """
    ends = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
    }
    required = config.tensor_shapes()
    for name, shape in (ends | required).items():
        if name not in found:
            if name not in required:
                continue
            raise UserError(f"{where}: the tensor {name} {list(shape)} is missing; config.json asks for it.")
        if found[name] != shape:
            raise UserError(f"{where}: {name} has shape {list(found[name])}, config.json asks for {list(shape)}.")
    unknown = sorted(set(found) - set(required) - set(ends))
    if unknown:
        raise UserError(f"{where}: the tensor {unknown[0]} is not part of a {config.algorithm} draft with this config.")


def write(
    path: Path,
    config: dict[str, Any],
    tensors: "dict[str, torch.Tensor]",
    write_training_state: Callable[[Path], None] | None = None,
    notes: dict[str, Strict] | None = None,
) -> None:
    """Write a checkpoint directory atomically: floating-point tensors as bfloat16, whole or not at all.

    Args:
        path: its final name; must not exist.
        config: what `DraftConfig.to_json` gives.
        tensors: by the names that vLLM loads.
        write_training_state: called with the `training/` directory to fill; without it there is none.
        notes: files to lay beside config.json, by name.
    """
    import torch
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        on_disk = {name: t.detach().bfloat16() if t.is_floating_point() else t.detach() for name, t in tensors.items()}
        on_disk = {name: t.contiguous().cpu() for name, t in on_disk.items()}
        mask_embedding = on_disk.pop(MASK_EMBEDDING, None)
        if mask_embedding is not None:
            state = {"mask_token_id": config["mask_token_id"], "embedding": mask_embedding}
            torch.save(state, temporary / MASK_EMBEDDING_FILE)
        save_file(on_disk, temporary / "model.safetensors")
        write_json(temporary / "config.json", config)
        for name, note in (notes or {}).items():
            write_json(temporary / name, note)
        if write_training_state:
            (temporary / "training").mkdir()
            write_training_state(temporary / "training")
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_tensors(checkpoint: Path) -> "dict[str, torch.Tensor]":
    """All tensors of a checkpoint.

    Raises:
        UserError: the mask embedding's file holds something else.
    """
    from safetensors.torch import load_file

    tensors = dict(load_file(checkpoint / "model.safetensors"))
    file = checkpoint / MASK_EMBEDDING_FILE
    return tensors | ({MASK_EMBEDDING: read_mask_embedding(file)} if file.exists() else {})


def read_mask_embedding(file: Path) -> "torch.Tensor":
    """The embedding [H] of the mask token: a tensor, or one under "embedding" (vLLM, `qwen3_dflash.py`).

    Raises:
        UserError: it holds neither.
    """
    import pickle

    import torch

    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        tensor = state["embedding"] if isinstance(state, dict) else state
        return torch.as_tensor(tensor).reshape(-1)
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: not a mask embedding that vLLM loads ({str(error).splitlines()[0]}).") from None

"""Tensors of drafts trained elsewhere: read, renamed, their vocabulary maps and ends made complete, all checked."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from speculators.algorithms.draft_config import DraftConfig
from speculators.algorithms.draft_ends import EMBEDDING, OUTPUT, differing
from speculators.algorithms.verifier_head import VerifierHead
from speculators.checkpoint import MASK_EMBEDDING, MASK_EMBEDDING_FILE, check_shapes, read_mask_embedding
from speculators.errors import UserError
from speculators.verifier import Verifier

_PREFIXES = ("module.", "model.")
_PICKLE = "pytorch_model.bin"


def weight_files(source: Path) -> list[Path]:
    """The files that hold a draft's tensors, safetensors before pickles.

    Raises:
        UserError: there is none.
    """
    files = sorted(source.glob("*.safetensors")) or sorted(source.glob("pytorch_model*.bin"))
    if not files:
        raise UserError(f"{source}: no *.safetensors and no {_PICKLE}; give the directory of a trained draft.")
    mask = source / MASK_EMBEDDING_FILE
    return [*files, mask] if mask.exists() else files


def read_foreign_tensors(source: Path, config: DraftConfig, verifier: Verifier) -> tuple[dict[str, Tensor], list[str]]:
    """All tensors of `config.tensor_shapes()`, floating-point ones as they were stored, and own ends beyond it.

    Returns:
        The tensors, and sentences about what was decided or left behind.

    Raises:
        UserError: unreadable, not of the config's names and shapes, not finite, or maps that contradict each other.
    """
    notes: list[str] = []
    tensors: dict[str, Tensor] = {}
    for file in weight_files(source):
        for name, tensor in _load(file).items():
            bare = _bare(name)
            if bare in tensors:
                raise UserError(f"{file}: {name} is there twice, the other time without its prefix or in another file.")
            tensors[bare] = tensor
    # Made anew from the config, and never read by vLLM.
    dropped = [name for name in tensors if "rotary_emb." in name or _unused_norm(name)]
    for name in dropped:
        del tensors[name]
    if dropped:
        notes.append(f"left out, since nothing reads it: {', '.join(sorted(dropped))}")
    ids = _draft_ids(tensors, config, str(source), notes)
    head = VerifierHead(verifier, ids)
    _complete_ends(tensors, config, head, notes)
    check_shapes(str(source), {name: tuple(t.shape) for name, t in tensors.items()}, config)
    _drop_equal_ends(tensors, config, head)
    for name, tensor in tensors.items():
        if name not in ("t2d", "d2t") and tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UserError(f"{source}: {name} is stored as {tensor.dtype}; give the unquantised draft.")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{source}: {name} holds values that are not finite; the draft is damaged.")
    return tensors, notes


def _load(file: Path) -> dict[str, Tensor]:
    import pickle

    if file.name == MASK_EMBEDDING_FILE:
        return {MASK_EMBEDDING: read_mask_embedding(file)}
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: cannot be read as tensors ({str(error).splitlines()[0]}).") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise UserError(f"{file}: holds something else than tensors by name.")
    return loaded


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("midlayer.", "layers.0.")


def _unused_norm(name: str) -> bool:
    return name.endswith(".hidden_norm.weight") and not name.startswith("layers.0.")


def _draft_ids(tensors: dict[str, Tensor], config: DraftConfig, where: str, notes: list[str]) -> Tensor:
    """Verifier ids of the draft vocabulary, ascending; sets t2d and d2t (offsets) and orders the output rows by them.

    vLLM reads d2t as offsets. A map of plain ids is recognised by t2d, or, without t2d, when as offsets it leaves the
    vocabulary.
    """
    D, V = config.draft_vocab_size, config.vocab_size
    t2d, d2t = tensors.pop("t2d", None), tensors.pop("d2t", None)
    if t2d is not None and (t2d.shape != (V,) or int(t2d.bool().sum()) != D):
        raise UserError(
            f"{where}: t2d has shape {list(t2d.shape)} and {int(t2d.bool().sum())} tokens; its config says "
            f"{D} of {V} (draft_vocab_size of vocab_size)."
        )
    kept = t2d.bool().nonzero()[:, 0] if t2d is not None else torch.arange(V) if D == V else None
    if d2t is None:
        if kept is None:
            raise UserError(f"{where}: neither d2t nor t2d is there, and the draft has {D} of the {V} tokens.")
        ids = kept
    else:
        if d2t.shape != (D,) or d2t.is_floating_point():
            raise UserError(f"{where}: d2t has shape {list(d2t.shape)} and type {d2t.dtype}; its config says [{D}].")
        readings = {"offsets": d2t.long() + torch.arange(D), "ids": d2t.long()}
        fitting = [name for name, ids in readings.items() if _is_map(ids, kept, V)]
        if not fitting:
            raise UserError(f"{where}: d2t is no map of the draft vocabulary, neither as offsets nor as token ids.")
        if fitting[0] == "ids":
            notes.append("d2t held token ids; written as offsets")
        ids = readings[fitting[0]]
    order = ids.argsort()
    if not torch.equal(order, torch.arange(D)):
        if OUTPUT not in tensors or len(tensors[OUTPUT]) != D:
            raise UserError(f"{where}: d2t is not ascending and there is no {OUTPUT} of {D} rows to order with it.")
        tensors[OUTPUT] = tensors[OUTPUT][order]
        ids = ids[order]
        notes.append("the draft vocabulary was not in ascending order; output rows and maps were sorted")
    if D != V:
        mask = torch.zeros(V, dtype=torch.bool)
        mask[ids] = True
        tensors |= {"t2d": mask, "d2t": ids - torch.arange(D)}
    return ids


def _is_map(ids: Tensor, kept: Tensor | None, vocab_size: int) -> bool:
    ordered = ids.sort().values
    if kept is not None:
        return torch.equal(ordered, kept)
    return int(ordered[0]) >= 0 and int(ordered[-1]) < vocab_size and bool((ordered[1:] > ordered[:-1]).all())


def _complete_ends(tensors: dict[str, Tensor], config: DraftConfig, head: VerifierHead, notes: list[str]) -> None:
    """Ends that our format ships and the source does not are the verifier's rows, as vLLM shares them."""
    for name, rows in ((EMBEDDING, head.embedding_VH), (OUTPUT, head.output_DH)):
        if name in config.tensor_shapes() and name not in tensors:
            tensors[name] = rows
            notes.append(f"{name} is the verifier's")


def _drop_equal_ends(tensors: dict[str, Tensor], config: DraftConfig, head: VerifierHead) -> None:
    """vLLM shares the verifier's rows with a draft that ships none; a copy would only take memory."""
    own = differing(tensors, head)
    for name in (EMBEDDING, OUTPUT):
        if name in tensors and name not in config.tensor_shapes() and name not in own:
            del tensors[name]

"""The hidden-state cache on disk: one safetensors file a sample in a two-level tree, tied to a verifier by a manifest.

A file is written atomically and checked on arrival and on load (token ids, shape, finite values): a bad one is named,
never trained on.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from speculators.errors import UserError
from speculators.schema import Strict, atomic_path, read_json, write_json
from speculators.verifier import Verifier

FORMAT_VERSION = 1


class HiddenStates(NamedTuple):
    """One sample's streams, bfloat16.

    Attributes:
        ids: int32 [T], the tokens that the verifier saw.
        aux_hidden: [T, A, H], the streams *entering* layers `aux_layer_ids` (Hugging Face `hidden_states[k]`).
        last_hidden: [T, H], the last residual stream *before* the final norm.
    """

    ids: torch.Tensor
    aux_hidden: torch.Tensor
    last_hidden: torch.Tensor


class CacheManifest(Strict):
    """What the states are states of."""

    format_version: int
    verifier: str
    verifier_revision: str
    template_hash: str
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @classmethod
    def of(cls, verifier: Verifier, aux_layer_ids: tuple[int, ...]) -> "CacheManifest":
        """The manifest of a new cache for this verifier."""
        return cls(
            format_version=FORMAT_VERSION,
            verifier=verifier.path,
            verifier_revision=verifier.revision,
            template_hash=verifier.template_hash,
            aux_layer_ids=aux_layer_ids,
            hidden_size=verifier.hidden_size,
            dtype="bfloat16",
        )


class HiddenStateCache:
    """An open cache. `aux_layer_ids` may ask for some of the cached layers; `read` returns just those, in order."""

    def __init__(self, path: Path, manifest: CacheManifest, aux_layer_ids: tuple[int, ...]) -> None:
        self.path = path
        self.manifest = manifest
        self.aux_layer_ids = aux_layer_ids
        self._columns = [manifest.aux_layer_ids.index(k) for k in aux_layer_ids]

    @classmethod
    def create(cls, path: Path, manifest: CacheManifest) -> "HiddenStateCache":
        """Open the cache at `path` for writing, making it if it is not there.

        Raises:
            UserError: a cache is there that was made from another verifier, template or set of layers.
        """
        if (path / "manifest.json").exists():
            cache = cls._open(path, manifest.aux_layer_ids)
            cache._check_same_source(manifest.verifier_revision, manifest.template_hash, manifest.verifier)
            if cache.manifest.aux_layer_ids != manifest.aux_layer_ids:
                raise UserError(
                    f"{path}: holds layers {list(cache.manifest.aux_layer_ids)}, "
                    f"asked for {list(manifest.aux_layer_ids)}; choose another output directory or the same layers."
                )
            return cache
        write_json(path / "manifest.json", manifest)
        return cls(path, manifest, manifest.aux_layer_ids)

    @classmethod
    def open(cls, path: Path, verifier: Verifier, aux_layer_ids: tuple[int, ...] | None) -> "HiddenStateCache":
        """Open an existing cache for reading; None takes all layers that it holds.

        Raises:
            UserError: no cache there, or one made from another verifier, template, or without the layers asked for.
        """
        cache = cls._open(path, aux_layer_ids)
        cache._check_same_source(verifier.revision, verifier.template_hash, verifier.path)
        return cache

    @classmethod
    def _open(cls, path: Path, aux_layer_ids: tuple[int, ...] | None) -> "HiddenStateCache":
        if not (path / "manifest.json").exists():
            raise UserError(
                f"--hidden-states: {path} is not a hidden-state cache (no manifest.json); "
                "make one with `speculators extract`."
            )
        manifest = read_json(path / "manifest.json", CacheManifest, "a hidden-state manifest")
        aux_layer_ids = manifest.aux_layer_ids if aux_layer_ids is None else aux_layer_ids
        missing = [k for k in aux_layer_ids if k not in manifest.aux_layer_ids]
        if missing:
            raise UserError(
                f"--hidden-states: {path} holds layers {list(manifest.aux_layer_ids)}, "
                f"the run asks for {list(aux_layer_ids)}; "
                "extract again with these layers or train on those that are there (--aux-layer-ids)."
            )
        return cls(path, manifest, aux_layer_ids)

    def _check_same_source(self, revision: str, template: str, verifier: str) -> None:
        for what, seen, wanted in (
            ("verifier", self.manifest.verifier_revision, revision),
            ("chat template", self.manifest.template_hash, template),
        ):
            if seen != wanted:
                raise UserError(
                    f"--hidden-states: {self.path} was made with another {what} ({seen}; {verifier} has {wanted}); "
                    "extract again for this verifier."
                )

    def file(self, sample_id: str) -> Path:
        """Where the states of a sample are, whether or not they are there."""
        return self.path / sample_id[:2] / f"{sample_id}.safetensors"

    def __contains__(self, sample_id: str) -> bool:
        return self.file(sample_id).exists()

    def write(self, sample_id: str, states: HiddenStates) -> None:
        """Check and store one sample (atomic).

        Raises:
            UserError: wrong shape or layer count, or a value that is not finite.
        """
        file = self.file(sample_id)
        check_states(states, len(self.manifest.aux_layer_ids), self.manifest.hidden_size, str(file))
        with atomic_path(file) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in states._asdict().items()}, temporary)

    def read(self, sample_id: str, ids: np.ndarray) -> HiddenStates:
        """Load one sample.

        Raises:
            UserError: missing, truncated, not finite, or states of other tokens than `ids`; the file is named.
        """
        file = self.file(sample_id)
        try:
            tensors = load_file(file)
            states = HiddenStates(tensors["ids"], tensors["aux_hidden"], tensors["last_hidden"])
        except FileNotFoundError:
            raise UserError(
                f"{file}: no hidden states for this sample; run `speculators extract` again, it continues."
            ) from None
        except (SafetensorError, KeyError, OSError) as error:
            raise UserError(
                f"{file}: truncated or damaged ({error}); delete it and run `speculators extract` again."
            ) from None
        check_states(states, len(self.manifest.aux_layer_ids), self.manifest.hidden_size, str(file))
        if not np.array_equal(states.ids.numpy(), ids):
            raise UserError(f"{file}: holds the states of other tokens; delete it and run `speculators extract` again.")
        return states._replace(aux_hidden=states.aux_hidden[:, self._columns])


def check_states(states: HiddenStates, num_aux: int, hidden_size: int, where: str) -> None:
    """Raises UserError unless shapes fit and every value is finite."""
    length = len(states.ids)
    wanted = ((length, num_aux, hidden_size), (length, hidden_size))
    seen = (tuple(states.aux_hidden.shape), tuple(states.last_hidden.shape))
    if seen != wanted:
        raise UserError(
            f"{where}: hidden states of shape {seen[0]} and {seen[1]}, expected {wanted[0]} and {wanted[1]}."
        )
    for name, tensor in (("aux_hidden", states.aux_hidden), ("last_hidden", states.last_hidden)):
        if not torch.isfinite(tensor.float().sum()) and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).flatten(1).any(1).nonzero()[0])
            raise UserError(f"{where}: {name} is not finite (first at token {bad}); delete it and extract again.")

"""The hidden-state cache on disk: one safetensors file a sample in a two-level tree, tied to a verifier by a manifest.

A file is written atomically and checked on arrival and on load (token ids, shape, finite values, checksum): a bad one
is named, never trained on.
"""

import errno
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save

from speculators.data.cache_index import CacheIndex
from speculators.data.cache_manifest import CacheManifest
from speculators.data.stored_states import HiddenStates, check_states, from_tensors, to_tensors
from speculators.errors import UserError
from speculators.schema import atomic_path, write_json
from speculators.verifier import Verifier

NUM_CHECKED = 16
"""Samples whose checksum is verified whether or not it was asked for: the first ones that are read."""


class HiddenStateCache:
    """An open cache. `aux_layer_ids` may ask for some of the cached layers; `read` returns just those, in order."""

    def __init__(
        self, path: Path, manifest: CacheManifest, aux_layer_ids: tuple[int, ...], check_all: bool = False
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.aux_layer_ids = aux_layer_ids
        self.index = CacheIndex(path)
        self._columns = [manifest.aux_layer_ids.index(k) for k in aux_layer_ids]
        self._check_all = check_all
        self._reads = itertools.count()
        self._said_unchecked = False

    @classmethod
    def create(cls, path: Path, manifest: CacheManifest) -> "HiddenStateCache":
        """Open the cache at `path` for writing, making it if it is not there.

        Raises:
            UserError: a cache is there that was made from another verifier, template, tokenizer or set of layers or is
                stored in another way, or the disk is full.
        """
        if not (path / "manifest.json").exists():
            with _disk_with_room(path):
                write_json(path / "manifest.json", manifest)
        found = CacheManifest.read(path)
        found.check_same_source(manifest, path)
        found.check_same_contents(manifest, path)
        return cls(path, found, found.aux_layer_ids)

    @classmethod
    def open(
        cls, path: Path, verifier: Verifier, aux_layer_ids: tuple[int, ...] | None, check_all: bool = False
    ) -> "HiddenStateCache":
        """Open an existing cache for reading; None takes all layers that it holds.

        Args:
            path: the cache.
            verifier: whose states are wanted.
            aux_layer_ids: some of the layers in the cache.
            check_all: verify the checksum of every sample that is read, not of the first `NUM_CHECKED` alone.

        Raises:
            UserError: no cache there, or one made from another verifier, template, tokenizer, or without the layers
                asked for.
        """
        manifest = CacheManifest.read(path)
        aux_layer_ids = manifest.aux_layer_ids if aux_layer_ids is None else aux_layer_ids
        if not set(aux_layer_ids) <= set(manifest.aux_layer_ids):
            raise UserError(
                f"--hidden-states: {path} holds layers {list(manifest.aux_layer_ids)}, "
                f"the run asks for {list(aux_layer_ids)}; "
                "extract again with these layers or train on those that are there (--aux-layer-ids)."
            )
        manifest.check_same_source(CacheManifest.of(verifier, aux_layer_ids), path)
        return cls(path, manifest, aux_layer_ids, check_all)

    def file(self, sample_id: str) -> Path:
        """Where the states of a sample are, whether or not they are there."""
        return self.path / sample_id[:2] / f"{sample_id}.safetensors"

    def __contains__(self, sample_id: str) -> bool:
        return self.file(sample_id).exists()

    def write(self, sample_id: str, states: HiddenStates) -> None:
        """Check and store one sample (atomic). Threads and processes may write to one cache at once.

        Raises:
            UserError: wrong shape or layer count, a value that is not finite, or a full disk; nothing is left behind.
        """
        file = self.file(sample_id)
        check_states(states, len(self.manifest.aux_layer_ids), self.manifest.hidden_size, str(file))
        content = save(to_tensors(states, self.manifest.dtype))
        with _disk_with_room(self.path), atomic_path(file) as temporary:
            temporary.write_bytes(content)
            self.index.add(sample_id, len(states.ids), content)

    def read(self, sample_id: str, ids: np.ndarray) -> HiddenStates:
        """Load one sample, as bfloat16 however it is stored.

        Raises:
            UserError: missing, truncated, damaged, not finite, or states of other tokens than `ids`; the file is named.
        """
        file = self.file(sample_id)
        try:
            if next(self._reads) < NUM_CHECKED or self._check_all:
                content = file.read_bytes()
                self._check_sum(sample_id, content)
                tensors = load(content)
            else:
                tensors = load_file(file)
        except FileNotFoundError:
            raise UserError(
                f"{file}: no hidden states for this sample; run `speculators extract` again, it continues."
            ) from None
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from None
        states = self._checked(tensors, file)
        if not np.array_equal(states.ids.numpy(), ids):
            raise UserError(f"{file}: holds the states of other tokens; delete it and run `speculators extract` again.")
        return states._replace(aux_hidden=states.aux_hidden[:, self._columns])

    def as_read(self, states: HiddenStates) -> HiddenStates:
        """What `read` would return had these states of all cached layers been stored: rounded as the store rounds."""
        states = from_tensors(to_tensors(states, self.manifest.dtype), self.manifest.dtype)
        return states._replace(aux_hidden=states.aux_hidden[:, self._columns])

    def index_again(self, sample_ids: list[str]) -> list[str]:
        """Give stored samples that the index does not know a line, after checking them; they must be stored.

        Returns:
            Those that are damaged; they have no line.

        Raises:
            UserError: the disk is full.
        """
        damaged = []
        for sample_id in self.index.without_line(sample_ids):
            file = self.file(sample_id)
            try:
                content = file.read_bytes()
                states = self._checked(load(content), file)
            except (SafetensorError, OSError, UserError):
                damaged.append(sample_id)
                continue
            with _disk_with_room(self.path):
                self.index.add(sample_id, len(states.ids), content)
        return damaged

    def _checked(self, tensors: dict[str, torch.Tensor], file: Path) -> HiddenStates:
        try:
            states = from_tensors(tensors, self.manifest.dtype)
        except (KeyError, ValueError) as error:
            raise _damaged(file, error) from None
        check_states(states, len(self.manifest.aux_layer_ids), self.manifest.hidden_size, str(file))
        return states

    def _check_sum(self, sample_id: str, content: bytes) -> None:
        entry = self.index.entry(sample_id)
        if entry is None:
            if not self._said_unchecked:
                self._said_unchecked = True
                print(
                    f"{self.path}: sample {sample_id}, and perhaps others, has no checksum in the index, so that only "
                    "tokens, shape and finite values are checked; `speculators extract` adds it.",
                    file=sys.stderr,
                )
        elif not entry.fits(content):
            raise _damaged(self.file(sample_id), "its checksum is not the one that it was stored with")


def _damaged(file: Path, reason: object) -> UserError:
    return UserError(f"{file}: truncated or damaged ({reason}); delete it and run `speculators extract` again.")


@contextmanager
def _disk_with_room(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{path}: the disk is full ({error.strerror}); the samples that are there are whole and stay; "
            "free some space and start the same command again, it continues."
        ) from None

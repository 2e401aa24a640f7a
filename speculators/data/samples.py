"""The data directory that `prepare` writes and `extract` and `train` read: tokens, loss masks and token counts.

One flat memory-mapped array per field and split, so that a large data set costs no memory to open. No torch here.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from speculators.errors import UserError
from speculators.schema import Strict, read_json, write_json
from speculators.verifier import Verifier

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
FORMAT_VERSION = 1


class TokenizedSample(NamedTuple):
    """One conversation as tokens.

    Attributes:
        sample_id: 16 hex digits over the ids; names the sample's hidden states.
        conversation_id: what the train / validation split hashes; all turns of one conversation share it.
        source: the task or group the prompt came from ("chat", "math", ...), "" if unknown.
        ids: int32 [T].
        loss_mask: bool [T]; True where the token was written by the assistant (it is a target, not a prompt).
    """

    sample_id: str
    conversation_id: str
    source: str
    ids: np.ndarray
    loss_mask: np.ndarray


def sample_id(ids: np.ndarray) -> str:
    """The id of a token sequence: 16 hex digits of sha256 over its int32 little-endian bytes."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i4").tobytes()).hexdigest()[:16]


class SplitStats(Strict):
    """Counts of one split."""

    samples: int
    tokens: int
    supervised_tokens: int

    @classmethod
    def of(cls, samples: Sequence[TokenizedSample]) -> Self:
        """Of the samples in it."""
        return cls(
            samples=len(samples),
            tokens=sum(len(s.ids) for s in samples),
            supervised_tokens=sum(int(s.loss_mask.sum()) for s in samples),
        )


class DataManifest(Strict):
    """What the data was made for and with; training refuses data made for another verifier or template. Arguments of
    the template are those of all rows; None: each row's own."""

    format_version: int
    verifier: str
    verifier_revision: str
    template_hash: str
    max_length: int
    validation_share: float
    vocab_size: int
    splits: dict[Split, SplitStats]
    chat_template_kwargs: dict[str, Any] | None = None


class DataDirectory:
    """A prepared data directory: `manifest.json`, `token_counts.npy`, `<split>/{ids,loss_mask,offsets,names}.npy`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "manifest.json").exists():
            raise UserError(
                f"--data: {path} is not a data directory (no manifest.json); make one with `speculators prepare`."
            )
        self.manifest = read_json(self.path / "manifest.json", DataManifest, "a data manifest")
        if self.manifest.format_version != FORMAT_VERSION:
            raise UserError(
                f"{self.path}: data format {self.manifest.format_version}, this version reads {FORMAT_VERSION}; "
                "run `speculators prepare` again."
            )

    def check_made_for(self, verifier: Verifier) -> None:
        """Raises UserError when the tokens come from another verifier or chat template."""
        for key, seen, wanted in (
            ("verifier", self.manifest.verifier_revision, verifier.revision),
            ("chat template", self.manifest.template_hash, verifier.template_hash),
        ):
            if seen != wanted:
                raise UserError(
                    f"--data: {self.path} was prepared with another {key} ({seen}; {verifier.path} has {wanted}); "
                    "run `speculators prepare` for this verifier."
                )

    @property
    def token_counts(self) -> np.ndarray:
        """int64 [vocab_size]: how often each verifier token is a supervised target in the training split."""
        return np.load(self.path / "token_counts.npy")

    def split(self, name: Split) -> "SampleList":
        """The samples of one split, in a stable order."""
        return SampleList(self.path / name)

    @staticmethod
    def write(
        path: Path, manifest: DataManifest, counts: np.ndarray, splits: dict[Split, Sequence[TokenizedSample]]
    ) -> None:
        """Write a whole data directory beside `path` and move it into place; an older one is replaced only then."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            temporary.mkdir(parents=True)
            np.save(temporary / "token_counts.npy", counts)
            for name in SPLITS:
                _write_split(temporary / name, splits.get(name, ()))
            write_json(temporary / "manifest.json", manifest)
            old = path.with_name(f"{temporary.name}.old")
            if path.exists():
                path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


class SampleList(Sequence[TokenizedSample]):
    """Read-only, memory-mapped list of samples."""

    def __init__(self, path: Path) -> None:
        self._ids = np.load(path / "ids.npy", mmap_mode="r")
        self._loss_mask = np.load(path / "loss_mask.npy", mmap_mode="r")
        self._offsets = np.load(path / "offsets.npy")
        self._names = np.load(path / "names.npy")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        name, conversation, source = (str(part) for part in self._names[index])
        return TokenizedSample(name, conversation, source, self._ids[start:end], self._loss_mask[start:end])

    def __iter__(self) -> Iterator[TokenizedSample]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]: tokens of each sample."""
        return np.diff(self._offsets)


def _write_split(path: Path, samples: Iterable[TokenizedSample]) -> None:
    path.mkdir()
    samples = list(samples)
    empty = [np.zeros(0, dtype=np.int32)]
    np.save(path / "ids.npy", np.concatenate([s.ids for s in samples] or empty).astype(np.int32))
    np.save(path / "loss_mask.npy", np.concatenate([s.loss_mask for s in samples] or empty).astype(np.bool_))
    np.save(path / "offsets.npy", np.cumsum([0, *(len(s.ids) for s in samples)], dtype=np.int64))
    names = [[s.sample_id, s.conversation_id, s.source] for s in samples] or np.zeros((0, 3), dtype="U1")
    np.save(path / "names.npy", np.array(names, dtype=np.str_))

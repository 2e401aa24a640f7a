"""What a training subprocess is asked to do and what it reports, read by our interpreter and by upstream's alike.

Standard library and pydantic only: in upstream's environment `import speculators` is upstream's package, not ours. The
trap: `getrusage`'s peak of a child starts at its parent's size and can't be reset; VmHWM in /proc can, so it is used.
"""

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

Algorithm = Literal["eagle3", "dflash"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Job(_Frozen):
    """One training run: the same fields for both sides, so that both do the same work.

    Attributes:
        rows: directory that `own_driver.py` exported rows to; upstream reads it.
        output: where checkpoints go.
        max_anchors, block_size: dflash; ttt_steps: eagle3.
        save_every: steps between checkpoints; 0 saves none (ours: one at the end).
        overrides: further options in the side's own names; they win over the fields above.
    """

    algorithm: Algorithm
    verifier: str
    data: str
    hidden_states: str
    rows: str
    output: str
    steps: int
    row_length: int = 1024
    draft_vocab_size: int = 8192
    num_layers: int = 1
    ttt_steps: int = 3
    block_size: int = 8
    max_anchors: int = 128
    seed: int = 0
    save_every: int = 0
    overrides: dict[str, Any] = {}


class Sources(Protocol):
    """What a benchmark's options say about what is trained on."""

    @property
    def verifier(self) -> str:
        """Directory of the verifier."""

    @property
    def data(self) -> Path:
        """Data directory of `speculators prepare`."""

    @property
    def hidden_states(self) -> Path:
        """Cache of `speculators extract`."""


SHAPES: dict[Algorithm, dict[str, int]] = {
    "eagle3": {"num_layers": 1, "ttt_steps": 3},
    "dflash": {"num_layers": 2, "block_size": 8},
}


def make_job(algorithm: Algorithm, sources: Sources, directory: Path, **fields: Any) -> Job:
    """The run of `algorithm` in our draft's usual shape whose rows and checkpoints lie in `directory`.

    Args:
        fields: of `Job`, in place of its defaults and of the usual shape.
    """
    told = {
        "algorithm": algorithm,
        "verifier": sources.verifier,
        "data": str(sources.data),
        "hidden_states": str(sources.hidden_states),
        "rows": str(directory / "rows"),
        "output": str(directory / "run"),
    }
    return Job.model_validate({**told, **SHAPES[algorithm], **fields})


class Exported(_Frozen):
    """What lies in a directory of exported rows: `row-N.safetensors`, `vocab.safetensors` (t2d, d2t) and this.

    Attributes:
        order: the row of every step.
        fullness: tokens of all rows over the room in them.
        vocab_size: the verifier's.
    """

    aux_layer_ids: tuple[int, ...]
    mask_token_id: int
    order: tuple[int, ...]
    fullness: float
    vocab_size: int


class Measured(_Frozen):
    """What a run took. `tokens` counts real ones, never padding.

    Attributes:
        step_s: seconds of each optimizer step: forward, loss, backward, clipping, optimizer.
        resident_bytes: the process's resident memory with model and verifier ends loaded, before the first step.
        peak_bytes: the largest resident memory from then until the end of the last step.
        checkpoints: what was saved, oldest first.
    """

    step_s: tuple[float, ...]
    tokens: tuple[int, ...]
    losses: tuple[float, ...]
    resident_bytes: int
    peak_bytes: int
    checkpoints: tuple[str, ...]
    packages: dict[str, str]

    def tokens_per_s(self, warmup: int) -> float:
        """Over the steps after the first `warmup`."""
        return sum(self.tokens[warmup:]) / sum(self.step_s[warmup:])

    @property
    def peak_over_resident_bytes(self) -> int:
        """Gradients, optimizer state, activations and rows: what training adds to the loaded model."""
        return self.peak_bytes - self.resident_bytes


def settle() -> int:
    """Give freed memory back, restart the peak, and return the resident bytes. Linux only."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_bytes() -> int:
    """The largest resident memory since `settle`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")

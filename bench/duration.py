"""About how long a bench will take. What was measured is continued; what was not is guessed, and said to be a guess.

Decoding one stream reads every weight once a token, so its time is the weights' bytes over the memory's bandwidth.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.load import Load
from bench.records import BASELINE, RequestKey, RequestRecord
from serve.program import VllmProgram

_CPU_BYTES_PER_S, _GPU_BYTES_PER_S = 10e9, 1.5e12
_CPU_STEP_S, _GPU_STEP_S = 0.01, 0.004  # a step's fixed cost
_CPU_STREAMS = 4  # streams that a CPU serves in about the time of one
_START_S, _EAGER_START_S = 120.0, 45.0


class Duration(NamedTuple):
    """Seconds, and whether requests of this run were there to tell how long one takes."""

    seconds: float
    measured: bool

    def __str__(self) -> str:
        minutes = self.seconds / 60
        shown = f"{minutes:.0f} minutes" if minutes < 90 else f"{minutes / 60:.1f} hours"
        told = "going by the requests that are there" if self.measured else "a guess from the verifier's size"
        return f"about {shown} ({told}; drafts are taken to be as fast as the plain verifier)"


def duration(
    todo: Iterable[RequestKey],
    num_starts: int,
    finished: Iterable[RequestRecord],
    verifier: Path,
    program: VllmProgram | None,
    max_tokens: int,
    enforce_eager: bool,
) -> Duration:
    """Time for the requests `todo` and the starts of `num_starts` servers.

    Args:
        program: what serves; None when every server is running already.
    """
    seen = [r.e2e_s for r in finished if r.variant == BASELINE and r.e2e_s and r.point == Load(concurrency=1).name]
    on_cpu = program is not None and program.is_cpu
    request_s = float(np.mean(seen)) if seen else max_tokens * _token_s(verifier, on_cpu)
    points: dict[tuple[str, str, int], int] = {}
    for key in todo:
        point = (key.variant, key.point, key.pass_index)
        points[point] = points.get(point, 0) + 1
    sending = sum(_point_s(name, count, request_s, on_cpu) for (_, name, _), count in points.items())
    start_s = (_EAGER_START_S if enforce_eager else _START_S) if program else 0.0
    return Duration(sending + num_starts * start_s, bool(seen))


def _point_s(name: str, count: int, request_s: float, on_cpu: bool) -> float:
    if name.startswith("r"):
        return count / float(name[1:]) + request_s
    streams = int(name[1:])
    return count * request_s / (min(streams, _CPU_STREAMS) if on_cpu else streams)


def _token_s(verifier: Path, on_cpu: bool) -> float:
    weights = sum(file.stat().st_size for file in verifier.glob("*.safetensors")) if verifier.is_dir() else 0
    if on_cpu:
        return _CPU_STEP_S + weights / _CPU_BYTES_PER_S
    return _GPU_STEP_S + weights / _GPU_BYTES_PER_S

"""The extraction servers of one `speculators extract`: one that is started for it, or those that `--endpoint` names."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from serve.endpoint import Endpoint
from serve.spec import extraction_spec
from serve.vllm import running
from speculators.data.extract_options import ExtractOptions
from speculators.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "speculators-hs-"
_ENOUGH_BYTES = 2 << 30


class ExtractionServer(NamedTuple):
    """Where to ask, and where the answers' files lie."""

    base_url: str
    model: str
    storage_path: Path


@contextmanager
def extraction_endpoints(
    options: ExtractOptions, aux_layer_ids: tuple[int, ...], longest: int
) -> Iterator[tuple[ExtractionServer, ...]]:
    """Servers for the length of the block; the log of a started one is `vllm.log` in the output directory.

    Args:
        options: verifier, endpoints or vLLM to start, storage.
        aux_layer_ids: resolved layers.
        longest: tokens of the longest sample.

    Raises:
        UserError: as `serve.vllm.running`, or an endpoint does not answer or takes only shorter samples.
    """
    if options.endpoint:
        assert options.storage_path is not None
        yield tuple(_connect(url, options.storage_path, longest) for url in options.endpoint)
        return
    with _storage(options) as storage:
        spec = extraction_spec(
            options.verifier,
            aux_layer_ids,
            storage,
            extra_args=("--max-model-len", str(longest + 1), *(("--enforce-eager",) if options.eager else ())),
            tensor_parallel_size=options.tensor_parallel_size,
            vllm=options.vllm,
        )
        with running(spec, options.file("vllm.log")) as endpoint:
            yield (ExtractionServer(endpoint.base_url, endpoint.model, storage),)


def _connect(url: str, storage_path: Path, longest: int) -> ExtractionServer:
    endpoint = Endpoint.connect(url)
    limit = endpoint.max_model_len()
    if limit is not None and limit <= longest:
        raise UserError(
            f"--endpoint: {url} takes {limit} tokens (--max-model-len), the longest sample and its "
            f"one-token answer need {longest + 1}; start the server with more."
        )
    return ExtractionServer(endpoint.base_url, endpoint.model, storage_path)


@contextmanager
def _storage(options: ExtractOptions) -> Iterator[Path]:
    """A new directory, removed at the end; in memory where there is room, else in the output directory."""
    parent = options.storage_path
    if parent is None:
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > _ENOUGH_BYTES
        parent = SHARED_MEMORY if roomy and os.access(SHARED_MEMORY, os.W_OK) else options.output
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent, ignore_cleanup_errors=True) as path:
        yield Path(path)


def _remove_abandoned(parent: Path) -> None:
    """What a killed extraction left in memory: directories named after a process that is no more."""
    for leftover in parent.glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", leftover.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            shutil.rmtree(leftover, ignore_errors=True)

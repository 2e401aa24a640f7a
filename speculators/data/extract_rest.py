"""Hidden states from a vLLM extraction server over REST, one request a sample; its answer names the file to read.

The writer holds an exclusive lock on `FILE.lock` until the file is whole: a shared lock is taken before reading
(vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py).
"""

import fcntl
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import requests
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from speculators.data.hidden_states import HiddenStates
from speculators.errors import UserError

_TIMEOUT_S = 600.0
_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.5


class _TryAgainError(Exception):
    """What was wrong with this attempt."""


class RestSource:
    """Fetches one sample's states per call; several threads may call it. Leaving the context ends retries."""

    def __init__(
        self, base_url: str, model: str, storage_path: Path, num_aux: int, first_pause_s: float = _FIRST_PAUSE_S
    ):
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.storage_path = storage_path.resolve()
        self.num_aux = num_aux
        self._first_pause_s = first_pause_s
        self._closed = threading.Event()
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy does not know the server that writes to our directory
        self._session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=64))

    def __enter__(self) -> "RestSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()

    def __call__(self, sample_id: str, ids: np.ndarray) -> HiddenStates:
        """The states of `ids`, int32 [T].

        Raises:
            UserError: the server gave no usable answer after several attempts, refused the request, answered with other
                tokens, or named a file outside the storage directory.
        """
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt and self._closed.wait(self._first_pause_s * 2 ** (attempt - 1)):
                break
            try:
                return self._states(self._ask(sample_id, ids), sample_id, ids)
            except _TryAgainError as error:
                problem = str(error)
        raise UserError(
            f"{self.base_url}: no hidden states for sample {sample_id} ({len(ids)} tokens) after {_ATTEMPTS} attempts; "
            f"the last answer: {problem}."
        )

    def _ask(self, sample_id: str, ids: np.ndarray) -> Path:
        """Post the request; gives the path of the file that the answer names."""
        body = {"model": self.model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0}
        try:
            answer = self._session.post(f"{self.base_url}/v1/completions", json=body, timeout=_TIMEOUT_S)
        except requests.RequestException as error:
            raise _TryAgainError(f"{type(error).__name__}, {error}") from None
        if 400 <= answer.status_code < 500:
            raise UserError(f"{self.base_url}: refused sample {sample_id} ({len(ids)} tokens): {answer.text[:300]}")
        if answer.status_code != 200:
            raise _TryAgainError(f"status {answer.status_code}, {answer.text[:300]}")
        named = _path_in(answer)
        if named is None:
            raise UserError(
                f"{self.base_url}: its answer names no hidden states; start it with `speculators serve VERIFIER "
                f"--hidden-states-path {self.storage_path}`."
            )
        path = Path(named)
        if not path.resolve().is_relative_to(self.storage_path):
            raise UserError(
                f"--storage-path: {self.base_url} writes to {path}, which is outside {self.storage_path}; "
                "name the directory that the server writes to."
            )
        return path

    def _states(self, path: Path, sample_id: str, ids: np.ndarray) -> HiddenStates:
        lock = path.with_name(path.name + ".lock")
        try:
            with lock.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_SH)
                tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise _TryAgainError(f"{path} cannot be read ({error})") from None
        finally:
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        streams, seen = tensors["hidden_states"], tensors["token_ids"]
        wanted = (len(ids), self.num_aux + 1)
        if tuple(streams.shape[:2]) != wanted or not np.array_equal(seen.numpy(), ids):
            raise UserError(
                f"{self.base_url}: sample {sample_id} came back as {list(streams.shape)} for {len(seen)} tokens, "
                f"expected {[*wanted]} streams of the tokens sent; is it an extraction server for these layers?"
            )
        streams = streams.to(torch.bfloat16)
        return HiddenStates(seen.to(torch.int32), streams[:, :-1], streams[:, -1])


def _path_in(answer: requests.Response) -> str | None:
    try:
        body: dict[str, Any] = answer.json()
        return str(body["kv_transfer_params"]["hidden_states_path"])
    except (ValueError, KeyError, TypeError):
        return None

"""Hidden states from one vLLM extraction server over REST, a request a sample; its answer names the file to read.

The writer holds an exclusive lock on `FILE.lock` until the file is whole: a shared lock is taken before reading
(vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py). The file is deleted at once.
"""

import fcntl
import json
import threading
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from speculators.data.http_posts import Answer, NotUpError, Posts
from speculators.data.own_files import OwnFiles
from speculators.data.stored_states import HiddenStates, check_states
from speculators.errors import UserError

_TIMEOUT_S = 600.0
_APPEARS_S = 2.0
_LINGER_S = 10.0
_LATE_S = 3.0
_POLL_S = 0.02
_BUSY = (408, 425, 429)


class FetchError(Exception):
    """A request that gave no usable states.

    Attributes:
        kind: "down": nothing listens there (not up yet, or restarting); "silent": no answer in time; "failed": it hung
            up, answered with an error, or its file cannot be read; "wrong": states of other tokens or layers, or not
            finite; "refused": it will not take this sample.
    """

    def __init__(self, kind: Literal["down", "silent", "failed", "wrong", "refused"], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class RestSource:
    """One request a call, from any thread; `Endpoints` decides who is asked and how often."""

    def __init__(
        self,
        base_url: str,
        storage_path: Path,
        num_aux: int,
        hidden_size: int,
        timeout_s: float = _TIMEOUT_S,
        linger_s: float = _LINGER_S,
        late_s: float = _LATE_S,
    ) -> None:
        """
        Args:
            base_url: of the server, with or without `/v1`.
            storage_path: where it writes.
            num_aux: streams of a file, without the last one.
            hidden_size: of each stream.
            timeout_s: for a request, and for its file to become whole.
            linger_s: at the end, for what is in flight.
            late_s: at the end, for the files of requests that were cut.
        """
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.storage_path = storage_path.resolve()
        self.num_aux, self.hidden_size = num_aux, hidden_size
        self.timeout_s = timeout_s
        self._linger_s, self._late_s = linger_s, late_s
        self._closed, self._cut = threading.Event(), threading.Event()
        self._posts = Posts(self.base_url, timeout_s)
        self._files = OwnFiles(self.storage_path)
        self._in_flight = 0
        self._changed = threading.Condition()

    def close(self) -> None:
        """Wait a moment for what is in flight, cut the rest, and delete what its requests still bring."""
        self._closed.set()
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight == 0, self._linger_s)
        self._cut.set()
        self._posts.cut()
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight == 0, self._late_s)
        deadline = time.monotonic() + self._linger_s
        while self._files.sweep() < self._late_s and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._files.sweep_rest()

    def once(self, sample_id: str, ids: np.ndarray) -> HiddenStates:
        """The states of `ids`, int32 [T], from one request.

        Raises:
            FetchError: it gave none.
            UserError: the server is no extraction server, or named a file outside the storage directory.
        """
        mark = self._files.mark()
        with self._changed:
            if self._closed.is_set():
                raise FetchError("failed", "this run is ending")
            self._in_flight += 1
        try:
            return self._states(mark, self._ask(mark, sample_id, ids), sample_id, ids)
        finally:
            self._files.sweep()
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def _ask(self, mark: str, sample_id: str, ids: np.ndarray) -> Path:
        """Post the request; gives the path of the file that the answer names."""
        body = {"prompt": ids.tolist(), "max_tokens": 1, "temperature": 0}
        try:
            answer = self._posts.post("/v1/completions", body, {"X-Request-Id": mark})
        except NotUpError as error:
            raise FetchError("down", f"ConnectionError, {error}") from None
        except TimeoutError:
            self._files.expect(mark)
            raise FetchError("silent", f"no answer within {self.timeout_s:g} s") from None
        except (OSError, HTTPException) as error:
            self._files.expect(mark)
            raise FetchError("failed", f"{type(error).__name__}, {error}") from None
        if 400 <= answer.status < 500 and answer.status not in _BUSY:
            raise FetchError("refused", f"refused sample {sample_id} ({len(ids)} tokens): {answer.text[:300]}")
        if answer.status != 200:
            self._files.expect(mark)  # a server that dies may answer so and have begun the file
            raise FetchError("failed", f"status {answer.status}, {answer.text[:300]}")
        named = _path_in(answer)
        if named is None:
            raise UserError(
                f"{self.base_url}: its answer names no hidden states; start it with `speculators serve VERIFIER "
                f"--hidden-states-path {self.storage_path}`."
            )
        path = Path(named)
        if not path.resolve().is_relative_to(self.storage_path):
            self._files.expect(mark)
            raise UserError(
                f"--storage-path: {self.base_url} writes to {path}, which is outside {self.storage_path}; "
                "name the directory that the server writes to."
            )
        return path

    def _states(self, mark: str, path: Path, sample_id: str, ids: np.ndarray) -> HiddenStates:
        lock = path.with_name(path.name + ".lock")
        removable = True
        try:
            removable = self._wait_until_whole(path, lock)
            if not removable:
                self._files.expect(mark)
                raise FetchError("failed", f"{path} was not whole after {self.timeout_s:g} s")
            tensors = load_file(path)
            streams, seen = tensors["hidden_states"], tensors["token_ids"]
        except (OSError, SafetensorError) as error:
            raise FetchError("failed", f"{path} cannot be read ({error})") from None
        except KeyError as error:
            raise FetchError("wrong", f"{path} has no tensor {error}") from None
        finally:
            if removable:
                path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
        wanted = (len(ids), self.num_aux + 1)
        if tuple(streams.shape[:2]) != wanted or not np.array_equal(seen.numpy(), ids):
            raise FetchError(
                "wrong",
                f"sample {sample_id} came back as {list(streams.shape)} for {len(seen)} tokens, expected {[*wanted]} "
                "streams of the tokens sent; is it an extraction server for these layers?",
            )
        streams = streams.to(torch.bfloat16)
        states = HiddenStates(seen.to(torch.int32), streams[:, :-1], streams[:, -1])
        try:
            check_states(states, self.num_aux, self.hidden_size, f"sample {sample_id}")
        except UserError as error:
            raise FetchError("wrong", str(error).rstrip(".")) from None
        return states

    def _wait_until_whole(self, path: Path, lock: Path) -> bool:
        """Until the writer lets go of the lock; False when it does not in time. A lock that never appears is none."""
        started = time.monotonic()
        pause = _POLL_S / 20
        while True:
            waited = time.monotonic() - started
            try:
                with lock.open("rb") as held:
                    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            except FileNotFoundError:  # shared directories show a file late
                if path.exists() or waited > min(_APPEARS_S, self.timeout_s):
                    return True
            except BlockingIOError:
                if waited > self.timeout_s or self._cut.is_set():
                    return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)


def _path_in(answer: Answer) -> str | None:
    try:
        body: dict[str, Any] = json.loads(answer.text)
        return str(body["kv_transfer_params"]["hidden_states_path"])
    except (ValueError, KeyError, TypeError):
        return None

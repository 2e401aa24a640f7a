"""A stand-in for vLLM's extraction server that names and locks files as vLLM does, and misbehaves as it is told."""

import fcntl
import json
import os
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Script = Callable[[int, list[int]], str]
ORDERLY: Script = lambda number, ids: "well"  # noqa: E731


class UnrulyServer:
    """`script(number of the request from 1, ids)` says how a request ends.

    well, error (503), refuse (400), hang_up (no answer, no file), late (no answer, its file comes after `release` is
    set), slow (answers after `release`), locked (its file stays locked until `release`), no_file, other_tokens,
    other_layers, nan, elsewhere (names a file outside).
    """

    def __init__(
        self, storage: Path, states_of: Callable[[list[int]], torch.Tensor], script: Script = ORDERLY, port: int = 0
    ) -> None:
        self.requests: list[list[int]] = []
        self.release = threading.Event()
        self.arrived = threading.Semaphore(0)
        self._storage, self._states_of, self._script = storage, states_of, script
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
                with outer._lock:
                    outer.requests.append(ids)
                    number = len(outer.requests)
                outer.arrived.release()
                answer = outer._act(number, ids, self.headers["X-Request-Id"])
                if answer is None:
                    self.close_connection = True
                    return
                status, body = answer
                content = json.dumps(body).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    self.close_connection = True  # who asked is gone

            def do_GET(self) -> None:
                content = json.dumps({"data": [{"id": "verifier", "max_model_len": 4096}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "UnrulyServer":
        threading.Thread(target=self._server.serve_forever, args=(0.005,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.socket.close()

    def _act(self, number: int, ids: list[int], name: str) -> tuple[int, dict[str, Any]] | None:
        action = self._script(number, ids)
        file = self._storage / f"cmpl-{name}-0-{number:08x}.safetensors"
        if action == "hang_up":
            return None
        if action in ("error", "refuse"):
            return (503 if action == "error" else 400), {"error": f"out of luck {number}"}
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if action in ("late", "slow"):
            self.release.wait()
        if action == "locked":
            threading.Thread(target=lambda: (self.release.wait(), self._write(file, lock, action, ids))).start()
        else:
            self._write(file, lock, action, ids)
        if action == "late":
            return None
        named = self._storage.parent / "elsewhere.safetensors" if action == "elsewhere" else file
        return 200, {"kv_transfer_params": {"hidden_states_path": str(named)}}

    def _write(self, file: Path, lock: int, action: str, ids: list[int]) -> None:
        streams, seen = self._states_of(ids).clone(), torch.tensor(ids)
        if action == "other_tokens":
            seen += 1
        elif action == "other_layers":
            streams = streams[:, 1:].contiguous()
        elif action == "nan":
            streams[1, 0, 0] = float("nan")
        if action != "no_file":
            save_file({"hidden_states": streams, "token_ids": seen}, file)
        os.close(lock)

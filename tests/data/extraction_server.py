"""A stand-in for vLLM's extraction server: answers with files of hidden states, or in the ways that servers fail."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN = 8


def streams_of(ids: list[int], num_layers: int) -> torch.Tensor:
    """[T, num_layers, HIDDEN], a function of the ids alone."""
    base = torch.tensor(ids, dtype=torch.float32)[:, None, None]
    return (base + 100 * torch.arange(num_layers)[None, :, None] + torch.arange(HIDDEN)).bfloat16()


class ExtractionServer:
    """`tamper(number of the request, tensors, answer)` may change what is written and answered, or give a status."""

    def __init__(self, storage: Path, num_layers: int, tamper: Callable[[int, dict, dict], int | None] | None = None):
        self.requests: list[list[int]] = []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
                with lock:
                    outer.requests.append(ids)
                    number = len(outer.requests)
                file = storage / f"{number}.safetensors"
                tensors = {"hidden_states": streams_of(ids, num_layers), "token_ids": torch.tensor(ids)}
                answer: dict[str, Any] = {"kv_transfer_params": {"hidden_states_path": str(file)}}
                status = (tamper(number, tensors, answer) if tamper else None) or 200
                if tensors:
                    save_file(tensors, file)
                file.with_name(file.name + ".lock").touch()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"data": [{"id": "verifier", "max_model_len": 4096}]}).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "ExtractionServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

"""A small OpenAI-like server that streams what a test wrote down."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Script:
    """What the server answers: a status, then (delay before it, event) pairs; `drop` cuts the stream off after them."""

    def __init__(self, events: list[tuple[float, Any]], status: int = 200, drop: bool = False) -> None:
        self.events, self.status, self.drop = events, status, drop
        self.requests: list[dict[str, Any]] = []
        self.ill = False
        self.message = "out of memory"
        self.only: str | None = (
            None  # `status` is answered to requests whose last message has this in it, others succeed
        )
        self.metrics = ""
        self.resets = 0
        self.fail_from: int | None = None  # from this request on every one fails

    def completion(self, request: dict[str, Any]) -> Any:
        """What a request for a plain completion is answered with."""
        return {}


@contextmanager
def server(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            models = json.dumps({"data": [{"id": "m"}]})
            body = {"/metrics": script.metrics, "/v1/models": models}.get(self.path, "").encode()
            self.send_response(503 if script.ill and self.path == "/health" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            if self.path == "/reset_prefix_cache":
                script.resets += 1
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            script.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            failing = script.fail_from is not None and len(script.requests) > script.fail_from
            meant = script.only is None or script.only in script.requests[-1]["messages"][-1]["content"]
            if (script.status != 200 and meant) or failing:
                body = json.dumps({"error": {"message": script.message}}).encode()
                self.send_response(500 if failing else script.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            if self.path == "/v1/completions":
                body = json.dumps(script.completion(script.requests[-1])).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for delay, event in script.events:
                time.sleep(delay)
                self._chunk(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
            if script.drop:
                self.close_connection = True
                return
            self._chunk(b"")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # as many connections at once as any test opens

    running = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}"
    finally:
        running.shutdown()
        running.server_close()


def chunk(content: str | None = None, ids: list[int] | None = None, finish: str | None = None, **more: Any) -> Any:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice], **more}


def usage(completion: int, **more: Any) -> Any:
    counts = {"prompt_tokens": 7, "completion_tokens": completion, "total_tokens": 7 + completion}
    return {**chunk(), "choices": [], "usage": counts, **more}

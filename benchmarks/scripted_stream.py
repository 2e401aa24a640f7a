"""A streaming server of known timing: what it really did, by its own clock, is told at `/truth`.

It sends each chunk when it is due and notes when it wrote it, so its own lateness is no error of the client's.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Truth(NamedTuple):
    """One answer: seconds from the whole request's arrival to the first write, and per token after that."""

    num_tokens: int
    ttft_s: float
    tpot_s: float


class ScriptedStream:
    """Answers every chat request with `max_tokens` one-token chunks."""

    def __init__(self, ttft_s: float, tpot_s: float) -> None:
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.truth: list[Truth] = []

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One keep-alive connection of HTTP/1.1."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                arrived_body = await reader.readexactly(_content_length(head))
                arrived = time.perf_counter()
                path = head.split(b" ", 2)[1].decode()
                if path.endswith("/completions"):
                    await self._stream(json.loads(arrived_body), arrived, writer)
                else:
                    _answer(writer, self._told(path))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _told(self, path: str) -> Any:
        if path == "/truth":
            told, self.truth = self.truth, []
            return told
        return {"object": "list", "data": [{"id": "scripted", "object": "model", "max_model_len": 1 << 20}]}

    async def _stream(self, request: dict[str, Any], arrived: float, writer: asyncio.StreamWriter) -> None:
        count = int(request.get("max_tokens") or request.get("max_completion_tokens") or 16)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        written = []
        for number in range(count):
            due = arrived + self.ttft_s + number * self.tpot_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            _event(writer, _LAST if number == count - 1 else _CHUNK)
            written.append(time.perf_counter())
        prompt = 10
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        _event(writer, json.dumps({**_BASE, "choices": [], "usage": usage}).encode())
        _event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")
        self.truth.append(Truth(count, written[0] - arrived, (written[-1] - written[0]) / max(1, count - 1)))


_BASE = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}


def _chunk(finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": " word"}, "finish_reason": finish}
    return json.dumps({**_BASE, "choices": [choice]}).encode()


_CHUNK, _LAST = _chunk(None), _chunk("length")


def _event(writer: asyncio.StreamWriter, data: bytes) -> None:
    line = b"data: " + data + b"\n\n"
    writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")


def _answer(writer: asyncio.StreamWriter, value: Any) -> None:
    body = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
    writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def serve(port: int, ttft_s: float, tpot_s: float, ready: Callable[[int], None]) -> None:
    """Serve until cancelled; `ready` is called with the port once it listens."""
    server = await asyncio.start_server(ScriptedStream(ttft_s, tpot_s).connection, "127.0.0.1", port, backlog=1024)
    ready(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttft-s", type=float, required=True)
    parser.add_argument("--tpot-s", type=float, required=True)
    given = parser.parse_args()
    asyncio.run(serve(0, given.ttft_s, given.tpot_s, lambda port: print(port, flush=True)))

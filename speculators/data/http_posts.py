"""JSON questions to one server over connections that are kept, and that another thread can cut.

The trap: only a shutdown of its socket wakes a thread that waits for an answer; closing the connection does not.
"""

import json
import socket
import threading
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from speculators.errors import UserError

_CONNECT_S = 10.0


class NotUpError(Exception):
    """Nothing listens at the address, or not yet."""


class Answer(NamedTuple):
    """Status and body of an answer."""

    status: int
    text: str


class Posts:
    """Several threads may post at once. No proxies: they don't know a server that writes to our directory."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{base_url} is not the address of a server; give one such as http://127.0.0.1:8000.")
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._root = parts.hostname, parts.port, parts.path
        self._timeout_s = timeout_s
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._cut = False
        self._lock = threading.Lock()

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """Ask and wait for the whole answer.

        Raises:
            NotUpError: nothing listens there.
            TimeoutError: no answer in time.
            OSError, HTTPException: the server hung up, or its answer is not HTTP.
        """
        content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            try:
                return self._ask(kept, path, content, headers)
            except TimeoutError:
                raise
            except (OSError, HTTPException):
                pass  # the server closes connections that were idle for long
        return self._ask(self._connected(), path, content, headers)

    def cut(self) -> None:
        """End every question that is waiting for its answer; later ones fail at once."""
        with self._lock:
            self._cut = True
            for connection in [*self._busy, *self._idle]:
                sock: socket.socket | None = connection.sock
                if sock is not None:
                    try:
                        sock.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue  # the other side was faster

    def _connected(self) -> HTTPConnection:
        connection = self._kind(self._host, self._port, timeout=min(_CONNECT_S, self._timeout_s))
        try:
            connection.connect()
        except OSError as error:
            raise NotUpError(error.strerror or str(error) or type(error).__name__) from None
        connection.sock.settimeout(self._timeout_s)
        return connection

    def _ask(self, connection: HTTPConnection, path: str, content: bytes, headers: dict[str, str]) -> Answer:
        with self._lock:
            if self._cut:
                connection.close()
                raise ConnectionAbortedError("this run is ending")
            self._busy.add(connection)
        well = False
        try:
            connection.request("POST", self._root + path, content, headers)
            response = connection.getresponse()
            answer = Answer(response.status, response.read().decode("utf-8", "replace"))
            well = not response.will_close
            return answer
        finally:
            with self._lock:
                self._busy.discard(connection)
                if well and not self._cut:
                    self._idle.append(connection)
                else:
                    connection.close()

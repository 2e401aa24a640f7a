"""The bare loop that extraction is compared with: post, wait for the file, delete it. Nothing is read, checked or kept.

    python bare_extraction.py PROMPTS.json URL CONCURRENCY      # prints the seconds it took

Standard library only, one kept connection a thread: what is left of the time is the server's.
"""

import fcntl
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

_POLL_S = 0.001


def ask_all(prompts: list[list[int]], url: str, concurrency: int) -> float:
    """Seconds for all prompts, `concurrency` at a time. Raises RuntimeError at the first answer without a file."""
    left, lock = iter(prompts), threading.Lock()
    failures: list[str] = []

    def mine() -> Iterator[list[int]]:
        while not failures:
            with lock:
                prompt = next(left, None)
            if prompt is None:
                return
            yield prompt

    def work() -> None:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=600)
        for prompt in mine():
            try:
                _remove_when_whole(Path(_ask(connection, prompt)))
            except (OSError, KeyError, TypeError, ValueError) as error:
                failures.append(f"{type(error).__name__}: {error}")
        connection.close()

    started = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError(f"{url}: {failures[0]}")
    return time.perf_counter() - started


def _ask(connection: HTTPConnection, prompt: list[int]) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return str(json.loads(connection.getresponse().read())["kv_transfer_params"]["hidden_states_path"])


def _remove_when_whole(file: Path) -> None:
    lock = file.with_name(file.name + ".lock")
    while not (lock.exists() or file.exists()):
        time.sleep(_POLL_S)
    if lock.exists():
        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
    file.unlink()
    lock.unlink(missing_ok=True)


if __name__ == "__main__":
    print(ask_all(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], int(sys.argv[3])))

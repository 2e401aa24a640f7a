"""Headless Chromium over its DevTools protocol: open a page from disk, look at what it drew, run its script.

The trap: what a page logs while it loads is only told to those who listened before it was opened.
"""

import asyncio
import itertools
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
_START_S = 60.0
_TICK_S = 0.05


def find_chromium() -> str | None:
    """Path of an installed Chromium."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab; `problems` are its console errors, exceptions and failed loads, `requested` what it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self.problems: list[str] = []
        self.requested: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        """One command; its result."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._answers[number], _START_S)

    async def open(self, path: Path, width: int, dark: bool = False) -> Self:
        """Open a file at a width of the window and wait until it is loaded and drawn."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        await self.scheme(dark)
        self._loaded.clear()
        await self.send("Page.navigate", url=path.resolve().as_uri())
        await asyncio.wait_for(self._loaded.wait(), _START_S)
        await self._drawn()
        return self

    async def scheme(self, dark: bool) -> None:
        """Light or dark, as the reader's system would ask for."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[feature])
        await self._drawn()

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def _drawn(self) -> None:
        """What was asked for so far has been painted after two frames."""
        await self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told.get("result", told.get("error")))
            else:
                self._note(told["method"], told["params"])

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded.set()
        elif event == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))

    async def close(self) -> None:
        """Stop listening."""
        self._reader.cancel()
        await self._socket.close()


@asynccontextmanager
async def page(profile: Path) -> AsyncIterator[Page]:
    """A tab of a Chromium of its own, which ends with the block; `profile` is an empty directory."""
    program = find_chromium()
    assert program, "ask find_chromium first"
    browser = subprocess.Popen([program, *_FLAGS, f"--user-data-dir={profile}"], stderr=subprocess.DEVNULL)
    try:
        port = await asyncio.wait_for(_port(profile / "DevToolsActivePort"), _START_S)
        async with (
            aiohttp.ClientSession() as session,
            session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer,
            session.ws_connect((await answer.json())["webSocketDebuggerUrl"], max_msg_size=0) as socket,
        ):
            tab = Page(socket)
            yield tab
            await tab.close()
    finally:
        browser.terminate()
        browser.wait()


async def _port(file: Path) -> str:
    """The port that the browser chose, which it writes down once it listens."""
    while not (file.exists() and "\n" in file.read_text()):
        await asyncio.sleep(_TICK_S)
    return file.read_text().splitlines()[0]

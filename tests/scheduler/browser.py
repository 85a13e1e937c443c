"""Headless Chromium over its DevTools socket: open a page, run JavaScript in it, take a picture.  Nothing is downloaded."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """``async with Browser() as page: await page.open(url); await page.run("1 + 1")``."""

    def __init__(self, width: int = 1400, height: int = 1600) -> None:
        self._size = (width, height)
        self._id = 0

    async def __aenter__(self) -> Browser:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp(prefix="rose-chromium-")
        self._process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
            "--disable-background-networking",
            f"--window-size={self._size[0]},{self._size[1]}",
            f"--user-data-dir={self._profile}",
            "--remote-debugging-port=0",
            "about:blank",
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stderr is not None
        while line := (await self._process.stderr.readline()).decode():
            if "DevTools listening on ws://" in line:
                break
        else:
            raise RuntimeError("chromium ended")
        port = line.split("ws://", 1)[1].split("/", 1)[0].rsplit(":", 1)[1]
        self._drain = asyncio.create_task(self._process.stderr.read())
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as response:
            target = next(each for each in await response.json() if each["type"] == "page")
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**27)
        self.requests: list[str] = []
        """Every address the page asked for."""
        self.errors: list[str] = []
        self.num_bytes = 0
        """Received by the page."""
        await self._call("Page.enable")
        await self._call("Network.enable")
        await self._call("Runtime.enable")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        self._process.kill()
        await self._process.wait()
        self._drain.cancel()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def open(self, url: str) -> None:
        await self._call("Page.navigate", url=url)
        await self.until("document.body !== null && location.protocol !== 'about:'")

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = await self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    async def until(self, script: str, timeout_s: float = 60.0, period_s: float = 0.2) -> Any:
        async with asyncio.timeout(timeout_s):
            while not (value := await self.run(script)):  # noqa: ASYNC110 - what happens in another process
                await asyncio.sleep(period_s)
        return value

    async def picture(self, path: Path) -> None:
        answer = await self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        await self._socket.send_json({"id": self._id, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get("method") == "Network.dataReceived":
                self.num_bytes += message["params"]["dataLength"]
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"])[:500])
            if message.get("id") == self._id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

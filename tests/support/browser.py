"""Headless Chromium, driven over a pipe by its own DevTools protocol: nothing but the browser is needed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--proxy-server=direct://",
    "--remote-debugging-pipe",
    # A machine without a mouse has one here.
    "--blink-settings=primaryPointerType=4,availablePointerTypes=4,primaryHoverType=2,availableHoverTypes=2",
)
_KEYS: Final = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "ArrowRight": (39, ""),
    " ": (32, " "),
}


class BrowserError(AssertionError):
    """What the page, or the browser, says went wrong."""


class Page:
    """One tab.

    Attributes:
        problems: What the page logged as an error, exceptions and refused resources among it.
        urls: All that it asked the network for.
    """

    def __init__(self, pipe: _Pipe, session: str) -> None:
        self._pipe = pipe
        self._session = session
        self.problems: list[str] = []
        self.urls: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._pipe.send(method, params, self._session)

    async def open(self, url: str) -> None:
        answer = await self.send("Page.navigate", url=url)
        if "errorText" in answer and answer["errorText"] != "net::ERR_HTTP_RESPONSE_CODE_FAILURE":
            raise BrowserError(f"{url}: {answer['errorText']}")
        await self.until("document.readyState === 'complete'")

    async def leave(self) -> None:
        """Leave the page and forget its problems: it may have asked a server that has ended since."""
        await self.open("about:blank")
        self.problems.clear()

    @asynccontextmanager
    async def visiting(self, url: str) -> AsyncIterator[None]:
        """Show a page anew, at a desk's size; at the end it has asked no other host and had no problem."""
        await self.leave()
        self.urls.clear()
        await self.show_as(1280, 820)
        await self.open(url)
        yield
        assert self.problems == []
        assert {urlsplit(each).netloc for each in self.urls} == {urlsplit(url).netloc}

    async def reload(self) -> None:
        """Returns when the page is the new one: what is asked before that, the old one may still answer."""
        await self.js("window.isOld = true")
        await self.send("Page.reload")
        await self.until("!window.isOld && document.readyState === 'complete'")

    async def js(self, expression: str) -> Any:
        """What an expression comes to; promises are waited for."""
        answer = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str, within_s: float = 40.0) -> Any:
        """Wait until an expression is true; returns what it came to."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(BrowserError):
                        if found := await self.js(expression):
                            return found
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.js("document.body.innerText")
            raise BrowserError(f"not within {within_s} s: {expression}; the page says {text!r}") from None

    async def text(self, selector: str) -> str:
        found: str = await self.js(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    async def click(self, selector: str) -> None:
        """As a mouse does: at the middle of what is there."""
        place = await self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView("
            "{block: 'nearest'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2, e.contains(document.elementFromPoint("
            "r.x + r.width / 2, r.y + r.height / 2))]; })()"
        )
        if not place[2]:
            raise BrowserError(f"{selector} is hidden behind something")
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1
            )

    async def press(self, key: str, *, shift: bool = False) -> None:
        """One key, as a keyboard does."""
        code, text = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    async def type(self, text: str) -> None:
        """Into whatever has the focus."""
        await self.send("Input.insertText", text=text)

    async def show_as(self, width: int, height: int, *, theme: str = "light") -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.send(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}]
        )

    async def screenshot(self, path: Path) -> None:
        answer = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def accessible(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader finds."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", params)))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])


class _Pipe:
    """Messages to the browser and from it: JSON with a zero byte behind each."""

    def __init__(self, reader: asyncio.StreamReader, out: int) -> None:
        self._reader = reader
        self._out = out
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.pages: dict[str, Page] = {}
        self._task = asyncio.create_task(self._read())

    async def send(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(answer, 30)

    async def _read(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(BrowserError(str(message["error"])))
                else:
                    answer.set_result(message["result"])
            elif (page := self.pages.get(message.get("sessionId", ""))) is not None:
                page.note(message["method"], message["params"])

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError):
            await self._task


@asynccontextmanager
async def browser_page(profile: Path) -> AsyncIterator[Page]:
    """A fresh browser with one tab; its process is gone afterwards."""
    assert CHROMIUM is not None
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    # The browser reads at 3 and writes at 4.
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}',
        CHROMIUM,
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        pass_fds=(from_us, to_us),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
        start_new_session=True,
    )
    os.close(from_us)
    os.close(to_us)
    reader = asyncio.StreamReader(limit=2**26)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser, "rb", buffering=0)
    )
    pipe = _Pipe(reader, to_browser)
    try:
        target = (await pipe.send("Target.createTarget", {"url": "about:blank"}))["targetId"]
        attached = await pipe.send("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = pipe.pages[attached["sessionId"]] = Page(pipe, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            await page.send(f"{domain}.enable")
        yield page
    finally:
        with contextlib.suppress(BrowserError, TimeoutError, OSError):
            await pipe.send("Browser.close", {})
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
        await pipe.close()
        transport.close()
        # Its end of the pipe is closed in the next turns of the loop.
        await asyncio.sleep(0.01)
        os.close(to_browser)

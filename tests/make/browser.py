"""Headless Chromium, driven over its debugging pipe: what a page says to its console, fetches, and looks like."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
_SIZES = """({
  scroll: document.documentElement.scrollWidth, inner: document.documentElement.clientWidth,
  small: [...document.querySelectorAll('body *')].filter(e => e.childElementCount == 0 && e.textContent.trim()
    && !e.closest('svg') && parseFloat(getComputedStyle(e).fontSize) < 12).length,
  left: Math.min(...[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().left)),
  ink: getComputedStyle(document.body).color, page: getComputedStyle(document.body).backgroundColor})"""


@dataclass
class Shown:
    """A page as it was shown: its sizes and colours, what its console said, what it asked the network for."""

    sizes: Mapping[str, Any]
    said: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    png: bytes = b""


class Browser:
    """One Chromium with one tab, cut off from the network."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def hand_over() -> None:
            # Chromium reads from 3 and writes to 4; first out of the way of each other.
            spare_in, spare_out = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(spare_in, 3)
            os.dup2(spare_out, 4)

        words = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        words += ["--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe"]
        words += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "--force-device-scale-factor=1"]
        words += ["about:blank"]
        self._process = subprocess.Popen(
            [CHROMIUM, *words],
            preexec_fn=hand_over,
            close_fds=False,  # 3 and 4 stay; all others of Python's close themselves
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._events = b"", 0, list[dict[str, Any]]()
        tabs = self._send("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in tabs if one["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        conditions = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.send("Network.emulateNetworkConditions", **conditions)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(30)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command to the tab, and its result."""
        return self._send(method, self._session, **parameters)

    def _send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._events.append(answer)
        raise AssertionError("Chromium has gone")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._buffer:
                one, _, self._buffer = self._buffer.partition(b"\0")
                yield json.loads(one)
            data = os.read(self._in, 1 << 20)
            if not data:
                return
            self._buffer += data

    def show(self, page: Path, width: int, scheme: str, *, shot: bool = False, height: int = 900) -> Shown:
        """Load a file at a width, under a colour scheme (light, dark). shot: with a picture of the whole page."""
        self._events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not any(one.get("method") == "Page.loadEventFired" for one in self._events):
            self._events.append(next(self._messages()))
        sizes = self.send("Runtime.evaluate", expression=_SIZES, returnByValue=True)["result"]["value"]
        shown = Shown(sizes)
        for event in self._events:
            method, words = event.get("method"), event.get("params", {})
            if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                shown.said.append(json.dumps(words))
            if method == "Network.requestWillBeSent":
                shown.fetched.append(words["request"]["url"])
        if shot:
            picture = self.send("Page.captureScreenshot", captureBeyondViewport=True)
            shown.png = base64.b64decode(picture["data"])
        return shown

    def text(self, expression: str) -> Any:
        """What an expression comes to in the page."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in `folder`."""
    with Browser(folder / "profile") as opened:
        yield opened

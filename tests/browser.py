"""A real Chromium without a window, spoken to through a pipe in its own protocol: no driver, no port, no network.

with Browser() as browser:
    browser.open("file:///tmp/report.html")
    assert browser.js("document.title") == "fedgh – Pluribus"
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = [
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
    "--remote-debugging-pipe",
]
LONGEST = 60  # seconds to wait for anything


class Browser:
    """One page. What its console says, which errors it has and what it asks the network for is kept."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.mkdtemp(prefix="pluribus-browser-")
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # above 10, so that putting one in place 3 does not close the other before it is put in place 4
        given = [fcntl(end, F_DUPFD, 10) for end in (command_read, answer_write)]
        nowhere = os.open(os.devnull, os.O_RDWR)
        ends = {1: nowhere, 2: nowhere, 3: given[0], 4: given[1]}
        places = [(os.POSIX_SPAWN_DUP2, end, place) for place, end in ends.items()]
        argv = [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._pid = os.posix_spawn(CHROMIUM, argv, os.environ, file_actions=places, setpgroup=0)
        for end in (command_read, answer_write, nowhere, *given):
            os.close(end)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.troubles: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Browser:
        target = next(one for one in self("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._write)  # Chromium ends when its pipe does
        os.close(self._read)
        deadline = time.monotonic() + 5
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(0.02)
        shutil.rmtree(self._profile, ignore_errors=True)

    def __call__(self, method: str, **params: Any) -> Any:
        """One command of the protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], LONGEST)
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, "Chromium does not answer"
            self._buffer += part
        first, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(first)

    def _note(self, event: Any) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.troubles.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.troubles.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.troubles.append(params["entry"]["text"])
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("data:", "blob:")):
                self.requests.append(params["request"]["url"])

    # ---- what tests do ----------------------------------------------------------------------------------------------

    def open(self, address: str, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Go to a page and wait until it has drawn its plots."""
        self.troubles.clear()
        self.requests.clear()
        self.resize(width, height)
        self.scheme(scheme)
        self("Page.navigate", url=address)
        self.until(f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'")

    def resize(self, width: int, height: int = 900) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def scheme(self, name: str) -> None:
        """Light or dark, as the system would say."""
        self("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def js(self, expression: str) -> Any:
        """What an expression is in the page."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait for it to be true."""
        deadline = time.monotonic() + LONGEST
        while not self.js(expression):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """A click of a real mouse in the middle of an element."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{found}.scrollIntoView({{block: 'center'}})")
        x, y = self.js(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({found}.getBoundingClientRect())")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path, whole: bool = True) -> None:
        """A screenshot."""
        data = self(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=whole,
            **({"clip": self._all()} if whole else {}),
        )
        file.write_bytes(base64.b64decode(data["data"]))

    def _all(self) -> dict[str, float]:
        size = self("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

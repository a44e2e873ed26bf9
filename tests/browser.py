"""The Chromium of this machine, without a window, driven by Playwright.

with Browser() as browser:
    page = browser.open("file:///tmp/report.html")
    assert page.evaluate("document.title") == "fedgh – Pluribus"
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ConsoleMessage, Page, Request, sync_playwright

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
LONGEST = 60  # seconds to wait for anything


class Browser:
    """One page at a time. What its console says, which errors it has and what it asks the network for is kept."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pages: dict[bool, Page] = {}
        self._shown: Page | None = None
        self.troubles: list[str] = []
        self.requests: list[str] = []

    def __enter__(self) -> Browser:
        playwright = self._stack.enter_context(sync_playwright())
        self._chromium = self._stack.enter_context(playwright.chromium.launch(executable_path=CHROMIUM))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(
        self, address: str, width: int = 1200, scheme: Literal["light", "dark"] = "light", offline: bool = False
    ) -> Page:
        """A page once it is loaded. Nothing is left of the page before."""
        self._leave()
        page = self._page(is_mobile=width < 600)
        page.context.set_offline(offline)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(media="null", color_scheme=scheme)
        page.goto(address)
        self._shown = page
        return page

    def _leave(self) -> None:
        if self._shown is not None:
            self._shown.evaluate("[localStorage, sessionStorage].forEach(one => one.clear())")
            self._shown.goto("about:blank")  # what still happens on the page happens before the lists are emptied
            self._shown.mouse.move(-1, -1)  # over nothing
        self._shown = None
        self.troubles.clear()
        self.requests.clear()

    def _page(self, is_mobile: bool) -> Page:
        """One page for computers and one for phones show all addresses: a new one costs Chromium two processes."""
        if is_mobile not in self._pages:
            context = self._chromium.new_context(is_mobile=is_mobile)
            context.set_default_timeout(LONGEST * 1000)
            page = self._pages[is_mobile] = context.new_page()
            page.on("console", self._note_console)
            page.on("pageerror", lambda error: self.troubles.append(str(error)))
            page.on("request", self._note_request)
        return self._pages[is_mobile]

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.troubles.append(message.text)

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith(("data:", "blob:")):
            self.requests.append(request.url)


def until(page: Page, expression: str) -> None:
    """Wait for it to be true. Playwright's own wait calls eval in the page, which the policy of a report forbids."""
    deadline = time.monotonic() + LONGEST
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.wait_for_timeout(50)


def violations(page: Page) -> list[str]:
    """What axe-core finds that keeps people from reading a page: its rule, and the first element that breaks it."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:120]}" for one in found]

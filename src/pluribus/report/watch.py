"""Live pages of runs: a small web server for this machine only.

A run folder:        /               the page of the run
A folder of runs:    /               the list of runs, which links to the pages
                     /runs/NAME/     the page of one run
                     /all/           all runs in the same plots
Every page asks for its own data: data.json, or list.json, beside it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import unquote

from pluribus.errors import DeviceError, PluribusError, RangeError
from pluribus.report import check_packages
from pluribus.storage.code import Allow
from pluribus.storage.files import to_json

LOOPBACK = "127.0.0.1"
# Any port: the port that a browser uses is another one if ssh forwards it.
OUR_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
HTML, JSON = "text/html", "application/json"
WHY_NO_FEATURES = "Features are not shown during a run. pluribus report shows them when it has finished."


def watch(path: str | Path, port: int = 0, tell: Callable[[str], None] = print, allow: Allow = False) -> None:
    """Serve the page of a run, or those of all runs below a folder, until Ctrl-C. Port 0: choose a free port."""
    check_packages("jinja2")
    with make_server(Path(path), port, allow) as server:
        tell(f"{address(server)}   Ctrl-C stops it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            tell("")


def address(server: Watching) -> str:
    """URL of the page."""
    return f"http://{LOOPBACK}:{server.server_port}/"


def make_server(path: Path, port: int = 0, allow: Allow = False) -> Watching:
    """Create a server that listens. `serve_forever` starts to answer."""
    from pluribus.report.numbers import is_run

    served = OneRun(path, allow) if is_run(path) else ManyRuns(path, allow)
    served.first()  # so that a mistake shows now, not in the browser
    try:
        return Watching(served, port)
    except OverflowError:
        raise RangeError(f"--port must be in 0..65535, not {port}.") from None
    except OSError as error:
        where = f"{LOOPBACK}:{port}"
        raise DeviceError(f"cannot listen on {where}: {error.strerror}. Leave out --port for a free one.") from error


Answer = tuple[str, Callable[[], str]]  # the kind of a text, and what makes it


class OneRun:
    """What is served of a run folder."""

    def __init__(self, run: Path, allow: Allow) -> None:
        self._page = Page(run, allow)

    def first(self) -> str:
        return self._page.page()

    def find(self, path: str) -> Answer | None:
        return self._page.find(path.removeprefix("/"))


class ManyRuns:
    """What is served of a folder of runs. Only run folders that are found there have pages."""

    def __init__(self, folder: Path, allow: Allow) -> None:
        from pluribus.report.overview import Overview

        self._folder, self._allow = folder, allow
        self._list = Overview(folder, allow)
        self._pages: dict[str, Page] = {}
        self._lock = Lock()

    def first(self) -> str:
        with self._lock:
            return self._list.page()

    def find(self, path: str) -> Answer | None:
        if path == "/":
            return HTML, self.first
        if path == "/list.json":
            return JSON, self._content
        where, _, name = path.removeprefix("/").rpartition("/")
        page = self._page(unquote(where))
        return None if page is None else page.find(name)

    def _content(self) -> str:
        with self._lock:
            return to_json(self._list.content())

    def _page(self, where: str) -> Page | None:
        if where not in self._pages:
            folder = self._folder if where == "all" else self._list.find().get(where.removeprefix("runs/"))
            if folder is None or not (where == "all" or where.startswith("runs/")):
                return None
            self._pages[where] = Page(folder, self._allow, listed=True)
        return self._pages[where]


class Page:
    """A page about a run, or about all runs below a folder, and its data. They follow the files of the runs."""

    def __init__(self, run: Path, allow: Allow = False, listed: bool = False) -> None:
        self._run, self._allow, self._listed = run, allow, listed
        self._known: Any = {}
        self._cached: tuple[Any, str] | None = None
        self._lock = Lock()

    def find(self, name: str) -> Answer | None:
        return {"": (HTML, self.page), "data.json": (JSON, self.data)}.get(name)

    def page(self) -> str:
        from pluribus.report.page import page

        with self._lock:
            return page(*self._read(), live=True, listed=self._listed)

    def data(self) -> str:
        """The changing part of the page, as JSON."""
        from pluribus.report.numbers import is_run
        from pluribus.report.page import content

        with self._lock:
            stamp = self._stamp()
            if self._cached is None or self._cached[0] != stamp:
                more = {} if is_run(self._run) else {"finished": False}  # another run may start below the folder
                self._cached = stamp, to_json(content(*self._read()) | more)
            return self._cached[1]

    def _read(self) -> tuple[Any, Any]:
        from pluribus.report.numbers import read_runs
        from pluribus.report.plots import sections

        runs = read_runs([self._run], self._allow, self._known)
        return runs, sections(runs, why_not=WHY_NO_FEATURES)

    def _stamp(self) -> Any:
        from pluribus.report.numbers import in_use, run_folders

        patterns = ("*.*", "link/*.json")  # the second: what a federation knows about its sites
        folders = run_folders(self._run)
        files = [file for folder in folders for one in patterns for file in sorted(folder.glob(one))]
        held = [in_use(folder) for folder in folders]
        return held, [(file, facts.st_mtime_ns, facts.st_size) for file in files if (facts := _facts(file))]


def _facts(file: Path) -> Any:
    try:
        return file.stat()
    except OSError:  # the file was renamed in between
        return None


class Watching(ThreadingHTTPServer):
    """HTTP server for this machine only."""

    daemon_threads = True

    def __init__(self, served: OneRun | ManyRuns, port: int) -> None:
        self.served = served
        super().__init__((LOOPBACK, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Watching

    def do_GET(self) -> None:
        if not OUR_NAMES.fullmatch(self.headers.get("Host", "")):  # a foreign name that resolves to this address
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "This server is for this machine only.")
            return
        try:
            found = self.server.served.find(self.path)
            if found is None:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "This server has no such page.")
                return
            kind, make = found
            self._answer(HTTPStatus.OK, kind, make())
        except PluribusError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", error.sentence)

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        with contextlib.suppress(ConnectionError):  # the browser has disconnected
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""

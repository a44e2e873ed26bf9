"""The live page of a run: a small web server for this machine only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from pluribus.errors import DeviceError, PluribusError, RangeError
from pluribus.report import check_packages
from pluribus.storage.code import Allow
from pluribus.storage.files import to_json

LOOPBACK = "127.0.0.1"
WHY_NO_FEATURES = "Features are not shown during a run. pluribus report shows them when it has finished."


def watch(run: str | Path, port: int = 0, tell: Callable[[str], None] = print, allow: Allow = False) -> None:
    """Serve the page until Ctrl-C. Port 0: choose a free port."""
    check_packages("jinja2")
    with make_server(Path(run), port, allow) as server:
        tell(f"{address(server)}   Ctrl-C stops it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            tell("")


def address(server: Watching) -> str:
    """URL of the page."""
    return f"http://{LOOPBACK}:{server.server_port}/"


def make_server(run: Path, port: int = 0, allow: Allow = False) -> Watching:
    """Create a server that listens. `serve_forever` starts to answer."""
    pages = Pages(run, allow)
    pages.page()  # so that a mistake shows now, not in the browser
    try:
        return Watching(pages, port)
    except OverflowError:
        raise RangeError(f"--port must be in 0..65535, not {port}.") from None
    except OSError as error:
        where = f"{LOOPBACK}:{port}"
        raise DeviceError(f"cannot listen on {where}: {error.strerror}. Leave out --port for a free one.") from error


class Pages:
    """The page and its data, updated when the files of the run change."""

    def __init__(self, run: Path, allow: Allow = False) -> None:
        self._run, self._allow = run, allow
        self._known: Any = {}
        self._cached: tuple[Any, str] | None = None
        self._lock = Lock()

    def page(self) -> str:
        from pluribus.report.page import page

        with self._lock:
            return page(*self._read(), live=True)

    def data(self) -> str:
        """The changing part of the page, as JSON."""
        from pluribus.report.page import content

        with self._lock:
            stamp = self._stamp()
            if self._cached is None or self._cached[0] != stamp:
                self._cached = stamp, to_json(content(*self._read()))
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

    def __init__(self, pages: Pages, port: int) -> None:
        self.pages = pages
        super().__init__((LOOPBACK, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Watching

    def do_GET(self) -> None:
        hosts = [f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")]
        if self.headers.get("Host") not in hosts:  # a foreign name that resolves to this address
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "This server is for this machine only.")
        elif self.path == "/":
            self._serve("text/html", self.server.pages.page)
        elif self.path == "/data.json":
            self._serve("application/json", self.server.pages.data)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "This server has only one page.")

    def _serve(self, kind: str, make: Callable[[], str]) -> None:
        try:
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

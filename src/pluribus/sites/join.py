"""`pluribus join`: one site of a federation. A warm worker holds data and model, a SuperNode speaks with the server."""

from __future__ import annotations

import fcntl
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pluribus.errors import CertificateError, DeviceError, FileAccessError, FormatError, OtherRunError, WorkerError
from pluribus.sites.config import SiteFile, read_site
from pluribus.sites.flower.programs import Program, flower, free_port, module
from pluribus.sites.keys import check_authority, check_node_key

POLL = 0.5  # seconds between looks at what runs
AGAIN = 10.0  # seconds until what ended is started again
REFUSED_FOR = 150.0  # seconds of refusals until a site gives up; after a crash Flower refuses a key for up to a minute
LEAVE = 8.0  # seconds for the last answer to leave; a SuperNode looks every three
MOST_CRASHES = 5  # of the worker in a row
STEADY = 600.0  # seconds that a worker has to live to be a new row
REFUSED = "code: 2004"


def join(config: str | Path, *, tell: Callable[[str], None] = print) -> None:
    """Take part in a federation as the site that `config` describes, until it ends.

    >>> join("site.toml")     # doctest: +SKIP
    """
    file = Path(config)
    site = read_site(file)
    ca, key = site.keys / "ca.crt", site.keys / f"{site.name}.key"
    check_authority(ca, datetime.now(UTC))
    check_node_key(key)
    _address(site)
    flower("flower-supernode")
    with _alone(site.state), tempfile.TemporaryDirectory(prefix="pluribus-") as place:
        worker = Worker(file, site, Path(place) / "worker")
        node = Node(site, ca, key, Path(place) / "worker", tell)
        try:
            worker.start()  # first: what is wrong with data or model needs no server to be found
            wait_for_server(site, ca, tell)
            tell(f"{site.name} is ready: {site.model}, state in {site.state}")
            while not worker.done():
                worker.watch(tell)
                node.watch()
                time.sleep(POLL)
            tell(f"the federation has ended. Use the model: pluribus predict {site.state} IMAGES")
            time.sleep(LEAVE)
        finally:
            node.stop()
            worker.stop()


class Worker:
    """The process with data and model. It ends by itself when the server says farewell."""

    def __init__(self, file: Path, site: SiteFile, socket: Path) -> None:
        self._command = [*module("pluribus.sites.trainer"), str(file), str(socket)]
        self._socket = socket
        self._home = site.state / "flower"
        self._program: Program | None = None
        self._crashes = 0
        self._started = 0.0

    def start(self) -> None:
        """Start it, and wait until it has read its data."""
        self._socket.unlink(missing_ok=True)
        self._program, self._started = Program(self._command, self._home, log=None), time.monotonic()
        while not self._socket.exists():
            if (status := self._program.ended()) is not None:
                if status == 2:  # it has said why
                    raise SystemExit(status)
                raise WorkerError(f"the site's worker could not start (status {status}).")
            time.sleep(0.1)

    def watch(self, tell: Callable[[str], None]) -> None:
        """Start it again if it has died: all that it knew lies in the state folder."""
        if self._program is None or self._program.ended() in (None, 0):
            return
        self._crashes = 1 if time.monotonic() - self._started > STEADY else self._crashes + 1
        if self._crashes > MOST_CRASHES:
            raise WorkerError(f"the site's worker died {self._crashes} times in a row.")
        tell(f"the worker died (status {self._program.ended()}); it is started again")
        self.start()

    def done(self) -> bool:
        """Whether the federation has ended."""
        return self._program is not None and self._program.ended() == 0

    def stop(self) -> None:
        """End it."""
        if self._program is not None:
            self._program.stop()


class Node:
    """The SuperNode, started again whenever it ends. It speaks to nobody but the server and our worker."""

    def __init__(self, site: SiteFile, ca: Path, key: Path, socket: Path, tell: Callable[[str], None]) -> None:
        self._site = site
        self._ca, self._key, self._socket = ca, key, socket
        self._tell = tell
        self._home = site.state / "flower"
        self._home.mkdir(parents=True, exist_ok=True)
        self._program: Program | None = None
        self._next = 0.0  # when to start it again
        self._refused_since: float | None = None

    def watch(self) -> None:
        """Keep it running."""
        now = time.monotonic()
        if self._program is not None and self._program.ended() is not None:
            self._explain(now)
            self._program, self._next = None, now + AGAIN
        if self._program is None and now >= self._next:
            self._program = self._started()

    def stop(self) -> None:
        """End it."""
        if self._program is not None:
            self._program.stop()

    def _started(self) -> Program:
        log = self._home / "supernode.log"
        who = ["--root-certificates", self._ca, "--auth-supernode-private-key", self._key]
        where = ["--superlink", self._site.server, "--host", "127.0.0.1", "--port", str(free_port())]
        tie = ["--node-config", f'socket="{self._socket}"']
        nursery = [*module("pluribus.sites.flower.nursery"), self._socket.parent, "flower-supernode"]
        return Program([*nursery, *who, *where, *tie], self._home, log)

    def _explain(self, now: float) -> None:
        assert self._program is not None
        words = self._program.last_words()
        if REFUSED not in words:
            self._refused_since = None
            self._tell(f"the connection to {self._site.server} broke off; it is tried again")
            return
        self._refused_since = self._refused_since or now
        if now - self._refused_since > REFUSED_FOR:
            raise CertificateError(
                f"{self._site.server} refuses this site: it does not know the key {self._key}. Does its sites.toml "
                f"have the public half, and its federation.toml the name '{self._site.name}'?"
            )
        self._tell(
            f"{self._site.server} refuses this site's key. After a crash that lasts up to a minute; it is tried again"
        )


def wait_for_server(site: SiteFile, ca: Path, tell: Callable[[str], None]) -> None:
    """Until the server answers with a certificate that the CA has signed for the name that the site calls it by."""
    host, port = _address(site)
    end, told = time.monotonic() + site.wait, False
    context = ssl.create_default_context(cafile=str(ca))
    while True:
        try:
            with socket.create_connection((host, port), 10) as line:
                context.wrap_socket(line, server_hostname=host).close()
            return
        except ssl.SSLCertVerificationError as error:
            raise CertificateError(f"{site.server} is not who {ca} says: {error.verify_message}.") from error
        except OSError as error:
            reason = error.strerror or str(error)
            if time.monotonic() > end:
                raise DeviceError(f"cannot reach the server at {site.server}: {reason}.") from error
            if not told:
                tell(f"cannot reach the server at {site.server} yet ({reason}); trying for {site.wait:.0f} s")
                told = True
            time.sleep(1.0)


def _address(site: SiteFile) -> tuple[str, int]:
    host, _, port = site.server.rpartition(":")
    if not host or not port.isdecimal():
        raise FormatError(f"'server' in site.toml must be HOST:PORT, such as fl.example.org:9092, not '{site.server}'.")
    return host.strip("[]"), int(port)


@contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Two processes with one state would each believe to be the site."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OtherRunError(f"{state} is in use by another process: this site has joined already.") from None
    except OSError as error:
        raise FileAccessError(f"cannot write to {state}: {error.strerror}.") from error
    with lock:
        yield

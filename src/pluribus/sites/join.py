"""`pluribus join`: one site of a federation.

It starts two programs. The worker holds data and model. Flower's SuperNode exchanges messages with the server.
"""

from __future__ import annotations

import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pluribus.errors import CertificateError, DeviceError, FileAccessError, FormatError, OtherRunError, WorkerError
from pluribus.internal.digits import is_whole
from pluribus.internal.system import lock_file
from pluribus.sites.config import SiteFile, read_site
from pluribus.sites.flower.programs import BROKEN, Program, flower, free_port, module
from pluribus.sites.keys import check_authority, check_node_key

POLL = 0.5  # seconds between checks of the programs
RESTART = 10.0  # seconds until a SuperNode is restarted that has ended without signing off
REFUSED_FOR = 150.0  # seconds of refusals until a site gives up; after a crash Flower refuses a key for up to a minute
LEAVE = 8.0  # seconds to send the last answer; a SuperNode polls every three
MOST_CRASHES = 5  # of the worker in a row
STEADY = 600.0  # seconds; a crash of a worker that has run longer starts a new row
REFUSED = "code: 2004"  # Flower's error for a key that the server refuses


def join(config: str | Path, *, tell: Callable[[str], None] = print) -> None:
    """Take part in a federation as the site that `config` describes, until it ends."""
    file = Path(config)
    site = read_site(file)
    ca, key = site.ca_file(), check_keys(site)
    with lock_state(site.state), tempfile.TemporaryDirectory(prefix="pluribus-") as scratch:
        worker = SiteProcess(file, site, Path(scratch) / "worker")
        node = Node(site, ca, key, Path(scratch) / "worker", tell)
        try:
            worker.start()  # first: mistakes in data or model are found without a server
            wait_for_server(site, ca, tell)
            tell(f"{site.name} is ready: {site.model}, state in {site.state}")
            while not worker.done():
                worker.watch(tell)
                node.watch()
                time.sleep(POLL)
            tell(f"the federation has ended. Use the model: pluribus predict {site.state} FILES")
            time.sleep(LEAVE)
        finally:
            node.stop()
            worker.stop()


def check_keys(site: SiteFile) -> Path:
    """Refuse keys, an address or an installation with which a site cannot join. Returns the file of its key."""
    flower("flower-supernode")
    check_authority(site.ca_file(), datetime.now(UTC))
    check_node_key(site.key_file())
    _address(site)
    return site.key_file()


class SiteProcess:
    """The process with data and model. It exits when the server ends the federation."""

    def __init__(self, file: Path, site: SiteFile, socket: Path) -> None:
        self._command = [*module("pluribus.sites.trainer"), str(file), str(socket)]
        self._socket = socket
        self._home = site.state / "flower"
        self._program: Program | None = None
        self._crashes = 0
        self._started = 0.0

    def start(self) -> None:
        """Start the process, and wait until it has read its data."""
        self._socket.unlink(missing_ok=True)
        self._program, self._started = Program(self._command, self._home, log=None), time.monotonic()
        while not self._socket.exists():
            if (status := self._program.exit_status()) is not None:
                if status == 2:  # it has printed the reason
                    raise SystemExit(status)
                raise WorkerError(f"the site's worker could not start (status {status}).")
            time.sleep(0.1)

    def watch(self, tell: Callable[[str], None]) -> None:
        """Restart the process if it died. All that it needs is in the state folder."""
        if self._program is None or self._program.exit_status() in (None, 0):
            return
        self._crashes = 1 if time.monotonic() - self._started > STEADY else self._crashes + 1
        if self._crashes > MOST_CRASHES:
            raise WorkerError(f"the site's worker died {self._crashes} times in a row.")
        tell(f"the worker died (status {self._program.exit_status()}); it is restarted")
        self.start()

    def done(self) -> bool:
        """Whether the federation has ended."""
        return self._program is not None and self._program.exit_status() == 0

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()


class Node:
    """The SuperNode, restarted when it ends. It connects only to the server and to the site's worker."""

    def __init__(self, site: SiteFile, ca: Path, key: Path, socket: Path, tell: Callable[[str], None]) -> None:
        self._site = site
        self._ca, self._key, self._socket = ca, key, socket
        self._tell = tell
        self._home = site.state / "flower"
        self._home.mkdir(parents=True, exist_ok=True)
        self._program: Program | None = None
        self._next = 0.0  # when to restart it
        self._refused_since: float | None = None

    def watch(self) -> None:
        now = time.monotonic()
        if self._program is not None and self._program.exit_status() is not None:
            has_signed_off = self._program.exit_status() in (0, BROKEN)
            self._report_end(now)
            self._program, self._next = None, now + (0.0 if has_signed_off else RESTART)
        if self._program is None and now >= self._next:
            self._program = self._start()

    def stop(self) -> None:
        if self._program is not None:
            self._program.stop()

    def _start(self) -> Program:
        keys = ["--root-certificates", self._ca, "--auth-supernode-private-key", self._key]
        addresses = ["--superlink", self._site.server, "--host", "127.0.0.1", "--port", str(free_port())]
        config = ["--node-config", f'socket="{self._socket}"']
        forkserver = [*module("pluribus.sites.flower.forkserver"), self._socket.parent, "flower-supernode"]
        return Program([*forkserver, *keys, *addresses, *config], self._home, self._home / "supernode.log")

    def _report_end(self, now: float) -> None:
        assert self._program is not None
        if self._program.exit_status() == BROKEN:
            self._refused_since = None
            self._tell("a process of Flower was killed; its SuperNode starts again, and the server asks again")
            return
        if REFUSED not in self._program.last_words():
            self._refused_since = None
            self._tell(f"lost the connection to {self._site.server}; trying again")
            return
        self._refused_since = self._refused_since or now
        if now - self._refused_since > REFUSED_FOR:
            raise CertificateError(
                f"{self._site.server} refuses this site: it does not know the key {self._key}. The server needs the "
                f"public key in its sites.toml, and the name '{self._site.name}' in its federation.toml."
            )
        self._tell(
            f"{self._site.server} refuses this site's key. This lasts up to a minute after a crash; trying again"
        )


def wait_for_server(site: SiteFile, ca: Path, tell: Callable[[str], None]) -> None:
    """Wait for a server with a certificate that the CA has signed for the host name in `site.server`."""
    host, port = _address(site)
    end, is_told = time.monotonic() + site.wait, False
    context = ssl.create_default_context(cafile=str(ca))
    while True:
        try:
            with socket.create_connection((host, port), 10) as connection:
                context.wrap_socket(connection, server_hostname=host).close()
            return
        except ssl.SSLCertVerificationError as error:
            raise CertificateError(
                f"cannot verify the certificate of {site.server} with {ca}: {error.verify_message}."
            ) from error
        except OSError as error:
            reason = error.strerror or str(error)
            if time.monotonic() > end:
                raise DeviceError(f"cannot reach the server at {site.server}: {reason}.") from error
            if not is_told:
                tell(f"cannot reach the server at {site.server} yet ({reason}); trying for {site.wait:.0f} s")
                is_told = True
            time.sleep(1.0)


def _address(site: SiteFile) -> tuple[str, int]:
    host, _, port = site.server.rpartition(":")
    if not host or not is_whole(port) or int(port) > 65535:
        raise FormatError(f"'server' in site.toml must be HOST:PORT, such as fl.example.org:9092, not '{site.server}'.")
    return host.strip("[]"), int(port)


@contextmanager
def lock_state(state: Path) -> Iterator[None]:
    """Lock the state folder: it belongs to one process at a time."""
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / ".lock").open("w")
        lock_file(lock)
    except BlockingIOError:
        raise OtherRunError(f"{state} is in use by another process: this site has already joined.") from None
    except OSError as error:
        raise FileAccessError(f"cannot write to {state}: {error.strerror}.") from error
    with lock:
        yield

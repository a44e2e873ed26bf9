"""The server's end of the network: Flower's SuperLink on loopback, the gate in front of it, and the registered sites.

    sites  --TLS-->  gate  --TLS, loopback-->  SuperLink  <->  relay  --socket-->  the round loop

A program that dies is restarted, and the requests are sent again. Sites answer a repeated request with the same bytes.
If somebody else operates the SuperLink, then it is neither started nor stopped here, and there is no gate.
"""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pluribus.errors import ConfigError, DeviceError, MessageError, WorkerError
from pluribus.internal.digits import is_whole
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.flower.programs import Program, flower, flwr, flwr_all, free_port, module
from pluribus.sites.flower.wire import listen, receive, send
from pluribus.sites.keys import make_keys
from pluribus.sites.remote import Missing
from pluribus.storage.checks import first_wrong, is_text, read_table
from pluribus.storage.files import write_json, write_text
from pluribus.storage.toml import to_toml

LOOPBACK = "127.0.0.1"
SEEN = "seen.json"
NAME = "here"  # name of the SuperLink in Flower's command line
START = 60  # seconds for a program to start
GRACE = 15  # seconds after a deadline until the relay counts as dead
INNER_DAYS = 365


@dataclass(frozen=True)
class Endpoint:
    """The address that sites connect to, and its certificate."""

    listen: str
    certificate: Path
    key: Path
    largest: int
    """Bytes of the largest message."""


@dataclass(frozen=True)
class Superlink:
    """A SuperLink that somebody else operates, on this machine."""

    address: str
    ca: Path
    """Root certificate."""
    nodes: Mapping[str, int]
    """Node ids of the sites that its operator has registered. The others are registered by their keys."""


class Link:
    """Sends requests to the sites and returns their answers. Only sites with a known public key can connect."""

    def __init__(
        self, folder: Path, endpoint: Endpoint | Superlink, keys: Mapping[str, str], names: Mapping[int, str]
    ) -> None:
        """`keys` has the public key of each site that is to be registered."""
        self._folder = folder
        self._endpoint = endpoint
        self._keys = keys
        self._names = names
        self._nodes: dict[str, int] = {}  # site -> its node id in Flower
        self._programs: dict[str, Program] = {}
        self._connection: socket.socket | None = None  # to the relay
        self._scratch = tempfile.TemporaryDirectory(prefix="pluribus-")  # paths of sockets must be short
        self._socket = Path(self._scratch.name) / "relay"
        self._listener = listen(self._socket)
        self._port = free_port()
        self._home = folder / "home"
        self._database = folder / "link.db"

    def __enter__(self) -> Link:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._disconnect()
        for program in reversed(self._programs.values()):
            program.stop()
        self._listener.close()
        self._scratch.cleanup()

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> dict[int, bytes | Missing]:
        end = time.monotonic() + seconds
        nodes = {k: str(self._nodes[self._names[k]]) for k in requests}
        reason = "there was no time left"
        while time.monotonic() < end:
            try:
                connection = self._connect(end)
                left = max(0.0, end - time.monotonic())
                send(connection, seal({"seconds": left}, {nodes[k]: blob for k, blob in requests.items()}))
                self._wait_for(connection, left + GRACE)
                answer = unseal(receive(connection))
                missing = answer.head["missing"]
                self._note_seen(k for k, n in nodes.items() if n in answer.parts)
                return {k: answer.parts[n] if n in answer.parts else Missing(missing[n]) for k, n in nodes.items()}
            except (OSError, WorkerError, MessageError) as error:
                reason = str(error)
                self._disconnect()
        return dict.fromkeys(requests, Missing(f"Flower failed at the server: {reason}"))

    def _note_seen(self, answered: Iterable[int]) -> None:
        """Write when each site has last answered, for the live page."""
        file, now = self._folder / SEEN, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        before = read_seen(file)
        seen = {name: before.get(name) for name in self._names.values()}
        write_json(file, seen | {self._names[k]: now for k in answered})

    def leave(self) -> None:
        """Unregister the sites that this server has registered at the SuperLink of somebody else."""
        if isinstance(self._endpoint, Superlink):
            for site in self._keys:
                flwr(self._home, "supernode", "unregister", str(self._nodes[site]), NAME)
            write_json(self._folder / "nodes.json", {})

    def _open(self) -> None:
        flower("flower-superlink")
        shutil.copytree(Path(__file__).parent / "app", self._folder / "app", dirs_exist_ok=True)
        self._home.mkdir(exist_ok=True)
        self._note_seen([])
        if isinstance(self._endpoint, Superlink):
            self._use(self._endpoint)
        else:
            self._operate(self._endpoint)

    def _use(self, superlink: Superlink) -> None:
        """Connect to a SuperLink that already runs."""
        self._write_address(superlink.address, superlink.ca)
        try:
            listed = flwr(self._home, "supernode", "list", NAME)["nodes"]
            if unknown := [site for site, node in superlink.nodes.items() if str(node) not in _ids(listed)]:
                raise WorkerError(f"it knows no node {superlink.nodes[unknown[0]]}, which is to be '{unknown[0]}'")
            self._nodes = self._register(listed) | dict(superlink.nodes)
            self._connect(time.monotonic() + START)
        except WorkerError as error:
            raise DeviceError(
                f"cannot use the SuperLink at {superlink.address}: {error.sentence.rstrip('.')}."
            ) from error

    def _operate(self, endpoint: Endpoint) -> None:
        """Start a SuperLink of our own, and the gate."""
        inner = self._folder / "keys"  # Flower requires TLS on loopback too
        shutil.rmtree(inner, ignore_errors=True)
        make_keys(inner, [LOOPBACK], [], INNER_DAYS, datetime.now(UTC))
        self._write_address(f"{LOOPBACK}:{self._port}", inner / "ca.crt")
        is_known = self._database.exists()
        self._start_superlink(inner)
        listed = flwr(self._home, "supernode", "list", NAME)["nodes"] if is_known else []
        self._nodes = self._register(listed)
        for node in _ids(listed) - set(map(str, self._nodes.values())):
            flwr(self._home, "supernode", "unregister", node, NAME)
        self._start_gate(endpoint, inner)
        self._connect(time.monotonic() + START)  # start the relay now, before the first deadline runs

    def _write_address(self, address: str, ca: Path) -> None:
        there = {"address": address, "root-certificates": str(ca.absolute())}
        write_text(self._home / "config.toml", to_toml({"superlink": {"default": NAME, NAME: there}}))

    def _restart(self, name: str) -> None:
        assert isinstance(self._endpoint, Endpoint)
        inner = self._folder / "keys"
        if name == "superlink":
            self._start_superlink(inner)
        else:
            self._start_gate(self._endpoint, inner)

    def _start_superlink(self, inner: Path) -> None:
        tls = ["--ssl-ca-certfile", inner / "ca.crt", "--ssl-certfile", inner / "server" / "server.pem"]
        tls += ["--ssl-keyfile", inner / "server" / "server.key", "--enable-supernode-auth"]
        address = ["--host", LOOPBACK, "--port", str(self._port), "--database", self._database]
        forkserver = [*module("pluribus.sites.flower.forkserver"), self._scratch.name, "flower-superlink"]
        log = self._folder / "superlink.log"
        self._programs["superlink"] = Program([*forkserver, *tls, *address], self._home, log)
        self._wait_for_port()

    def _start_gate(self, own: Endpoint, inner: Path) -> None:
        to, ca, largest = f"{LOOPBACK}:{self._port}", inner / "ca.crt", str(own.largest)
        tls = ["--certificate", own.certificate, "--key", own.key, "--ca", ca, "--largest", largest]
        command = [*module("pluribus.sites.flower.gate"), "--listen", own.listen, "--to", to, *tls]
        gate = self._programs["gate"] = Program(command, self._home, self._folder / "gate.log")
        while "listening on" not in gate.last_words():
            if gate.exit_status() is not None:
                raise ConfigError(gate.last_words().strip().removeprefix("error: "))
            time.sleep(0.1)

    def _wait_for_port(self) -> None:
        superlink, end = self._programs["superlink"], time.monotonic() + START
        while time.monotonic() < end:
            if superlink.exit_status() is not None:
                raise WorkerError(f"the SuperLink exited at start: {superlink.last_words(500).strip()}")
            try:
                socket.create_connection((LOOPBACK, self._port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise WorkerError("the SuperLink does not answer.")

    def _connect(self, end: float) -> socket.socket:
        """The connection to the relay. What has died is restarted."""
        for name, program in list(self._programs.items()):
            if program.exit_status() is not None:
                self._disconnect()
                self._restart(name)
        if self._connection is None:
            app, left = self._folder / "app", min(START, end - time.monotonic())
            flwr(self._home, "run", app, NAME, "--run-config", f'socket="{self._socket}"', seconds=left)
            self._wait_for(self._listener, min(START, end - time.monotonic()))
            self._connection, _ = self._listener.accept()
        return self._connection

    def _wait_for(self, connection: socket.socket, seconds: float) -> None:
        """Wait until there is something to read, or until a program dies."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([connection], [], [], min(1.0, left))[0]:
                return
            if dead := [name for name, program in self._programs.items() if program.exit_status() is not None]:
                raise WorkerError(f"the {dead[0]} died.")
        raise WorkerError("the relay does not answer.")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _register(self, nodes: list[dict[str, Any]]) -> dict[str, int]:
        """Register the sites with a key at a SuperLink that knows `nodes`. Returns the node id of each."""
        file = self._folder / "nodes.json"
        known = read_nodes(file)
        same = {site: one for site, one in known.items() if self._keys.get(site) == one["key"]}
        known = {site: one for site, one in same.items() if str(one["node"]) in _ids(nodes)}
        new = {site: Path(self._scratch.name) / f"{site}.pub" for site in self._keys if site not in known}
        for site, public in new.items():
            public.write_text(f"{self._keys[site]}\n", encoding="utf-8")
        commands = [("supernode", "register", public, NAME) for public in new.values()]
        answers = flwr_all(self._home, commands, START + len(new)) if new else []
        for site, answer in zip(new, answers, strict=True):
            known[site] = {"key": self._keys[site], "node": answer["node-id"]}
        write_json(file, known)
        return {site: int(one["node"]) for site, one in known.items()}


def _ids(nodes: list[dict[str, Any]]) -> set[str]:
    """Node ids of these nodes, but for those that Flower lists after they were unregistered."""
    return {str(one["node-id"]) for one in nodes if one["status"] != "unregistered"}


def read_seen(file: Path) -> dict[str, str | None]:
    """When each site has last answered. None: not yet."""
    return read_table(file, lambda time: time is None or is_text(time), "Delete it: only the live page needs it.")


def read_nodes(file: Path) -> dict[str, dict[str, Any]]:
    """The public key and the node id of each registered site."""
    return read_table(file, _is_node, "Delete it: the sites are then registered again.")


def _is_node(facts: Any) -> bool:
    return first_wrong(facts, {"key": is_text, "node": _is_id}) is None


def _is_id(node: Any) -> bool:
    """Whether this is a node id. Flower's programs print it as a number or as a text."""
    return (type(node) is int and is_whole(str(node))) or is_whole(node)

"""The server's end of the network: Flower's SuperLink on loopback, the gate before it, and who may come in.

    sites  --TLS-->  gate  --TLS, loopback-->  SuperLink  <->  relay  --socket-->  the round loop

Whatever of this dies is started again; requests are then sent again, which sites answer as they did the first time.
"""

from __future__ import annotations

import select
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pluribus.errors import ConfigError, MessageError, WorkerError
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.flower.programs import Program, flower, flwr, flwr_all, free_port, module
from pluribus.sites.flower.wire import listen, receive, send
from pluribus.sites.keys import make_keys
from pluribus.sites.remote import Missing
from pluribus.storage.files import read_json, write_json, write_text
from pluribus.storage.toml import to_toml

LOOPBACK = "127.0.0.1"
NAME = "here"  # of the SuperLink, for Flower's command line
START = 60  # seconds for a program to start
GRACE = 15  # seconds beyond a deadline, until the relay is taken for dead
INNER_DAYS = 365


@dataclass(frozen=True)
class Door:
    """Where sites come in, and what they see there."""

    listen: str
    certificate: Path
    key: Path
    largest: int
    """Bytes of the largest message."""


class Link:
    """Carries blobs to the sites whose public keys it knows, and back."""

    def __init__(self, folder: Path, door: Door, keys: Mapping[str, str], names: Mapping[int, str]) -> None:
        self._folder = folder
        self._door = door
        self._keys = keys
        self._names = names
        self._nodes: dict[str, int] = {}  # site -> Flower's number for it
        self._programs: dict[str, Program] = {}
        self._line: socket.socket | None = None
        self._place = tempfile.TemporaryDirectory(prefix="pluribus-")  # paths of sockets must be short
        self._socket = Path(self._place.name) / "relay"
        self._listening = listen(self._socket)
        self._port = free_port()
        self._home = folder / "home"
        self._database = folder / "link.db"

    def __enter__(self) -> Link:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that was started."""
        self._hang_up()
        for program in reversed(self._programs.values()):
            program.stop()
        self._listening.close()
        self._place.cleanup()

    def exchange(self, requests: Mapping[int, bytes], seconds: float) -> dict[int, bytes | Missing]:
        """Send each site its request, and wait for answers, but no longer than so many seconds."""
        end = time.monotonic() + seconds
        nodes = {k: str(self._nodes[self._names[k]]) for k in requests}
        trouble = "there was no time"
        while time.monotonic() < end:
            try:
                line = self._connected(end)
                left = max(0.0, end - time.monotonic())
                send(line, seal({"seconds": left}, {nodes[k]: blob for k, blob in requests.items()}))
                self._wait_for(line, left + GRACE)
                answer = unseal(receive(line))
                missing = answer.head["missing"]
                return {k: answer.parts[n] if n in answer.parts else Missing(missing[n]) for k, n in nodes.items()}
            except (OSError, WorkerError, MessageError) as error:
                trouble = str(error)
                self._hang_up()
        return dict.fromkeys(requests, Missing(f"Flower failed at the server: {trouble}"))

    # ---- what runs -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        flower("flower-superlink")
        shutil.copytree(Path(__file__).parent / "app", self._folder / "app", dirs_exist_ok=True)
        inner = self._folder / "keys"  # for loopback, where Flower insists on TLS too
        shutil.rmtree(inner, ignore_errors=True)
        make_keys(inner, [LOOPBACK], [], INNER_DAYS, datetime.now(UTC))
        self._home.mkdir(exist_ok=True)
        address = {"address": f"{LOOPBACK}:{self._port}", "root-certificates": str(inner / "ca.crt")}
        write_text(self._home / "config.toml", to_toml({"superlink": {"default": NAME, NAME: address}}))
        known = self._database.exists()
        self._run("superlink")
        self._nodes = self._registered(flwr(self._home, "supernode", "list", NAME)["nodes"] if known else [])
        self._run("gate")
        self._connected(time.monotonic() + START)  # now, because later a deadline runs

    def _run(self, name: str) -> None:
        inner = self._folder / "keys"
        ca, log = inner / "ca.crt", self._folder / f"{name}.log"
        if name == "superlink":
            tls = ["--ssl-ca-certfile", ca, "--ssl-certfile", inner / "server" / "server.pem"]
            tls += ["--ssl-keyfile", inner / "server" / "server.key", "--enable-supernode-auth"]
            place = ["--host", LOOPBACK, "--port", str(self._port), "--database", self._database]
            nursery = [*module("pluribus.sites.flower.nursery"), self._place.name, "flower-superlink"]
            self._programs[name] = Program([*nursery, *tls, *place], self._home, log)
            self._wait_for_port()
        else:
            door, to = self._door, f"{LOOPBACK}:{self._port}"
            tls = ["--certificate", door.certificate, "--key", door.key, "--ca", ca, "--largest", str(door.largest)]
            command = [*module("pluribus.sites.flower.gate"), "--listen", door.listen, "--to", to, *tls]
            gate = self._programs[name] = Program(command, self._home, log)
            while "listening on" not in gate.last_words():
                if gate.ended() is not None:
                    raise ConfigError(gate.last_words().strip().removeprefix("error: "))
                time.sleep(0.1)

    def _wait_for_port(self) -> None:
        link, end = self._programs["superlink"], time.monotonic() + START
        while time.monotonic() < end:
            if link.ended() is not None:
                raise WorkerError(f"the SuperLink ended at once: {link.last_words(500).strip()}")
            try:
                socket.create_connection((LOOPBACK, self._port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        raise WorkerError("the SuperLink does not answer.")

    def _watch(self) -> None:
        """Start again what has died."""
        for name, program in list(self._programs.items()):
            if program.ended() is not None:
                self._hang_up()
                self._run(name)

    def _connected(self, end: float) -> socket.socket:
        """A line to a relay; one is started if there is none."""
        self._watch()
        if self._line is None:
            settings = f'socket="{self._socket}"'
            left = min(START, end - time.monotonic())
            flwr(self._home, "run", self._folder / "app", NAME, "--run-config", settings, seconds=left)
            self._wait_for(self._listening, min(START, end - time.monotonic()))
            self._line, _ = self._listening.accept()
        return self._line

    def _wait_for(self, line: socket.socket, seconds: float) -> None:
        """Until there is something to read; no longer than the programs live."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([line], [], [], min(1.0, left))[0]:
                return
            if dead := [name for name, program in self._programs.items() if program.ended() is not None]:
                raise WorkerError(f"the {dead[0]} died.")
        raise WorkerError("the relay does not answer.")

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    # ---- who may come in -------------------------------------------------------------------------------------------

    def _registered(self, nodes: list[dict[str, Any]]) -> dict[str, int]:
        """Every site's number at the SuperLink, which knows these nodes, and then exactly the sites."""
        file = self._folder / "nodes.json"
        known: dict[str, Any] = read_json(file) if file.exists() else {}
        listed = {str(one["node-id"]) for one in nodes}
        same = {site: one for site, one in known.items() if self._keys.get(site) == one["key"]}
        known = {site: one for site, one in same.items() if str(one["node"]) in listed}
        for node in listed - {str(one["node"]) for one in known.values()}:
            flwr(self._home, "supernode", "unregister", node, NAME)
        new = {site: Path(self._place.name) / f"{site}.pub" for site in self._keys if site not in known}
        for site, public in new.items():
            public.write_text(f"{self._keys[site]}\n", encoding="utf-8")
        commands = [("supernode", "register", public, NAME) for public in new.values()]
        answers = flwr_all(self._home, commands, START + len(new)) if new else []
        for site, answer in zip(new, answers, strict=True):
            known[site] = {"key": self._keys[site], "node": answer["node-id"]}
        write_json(file, known)
        return {site: int(one["node"]) for site, one in known.items()}

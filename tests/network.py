"""Real federations on loopback: keys, a server with its gate, and sites, each a tree of processes to be killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from forks import SOURCE, start
from pluribus.assembly import Assembly
from pluribus.data.datasets import write_npz
from pluribus.sites.config import read_site
from pluribus.sites.envelope import unseal
from pluribus.sites.flower.programs import environment, flower, free_port
from pluribus.sites.flower.wire import serve
from pluribus.sites.join import Node
from pluribus.sites.keys import make_keys
from pluribus.sites.responder import Responder
from pluribus.sites.trainer import RequestHandler, load_resources
from pluribus.storage.files import read_lines
from pluribus.storage.toml import to_toml
from processes import Process

PATIENCE = 240  # seconds until a test gives up; only one that fails waits so long


class Network:
    """A folder with the files of a server and of its sites, and their processes."""

    def __init__(self, folder: Path, parts: Assembly, names: Mapping[int, str]) -> None:
        """Sites hold what the simulation of these parts would give to its clients."""
        self.folder = folder
        self.names = names
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._running: dict[str, Process] = {}
        make_keys(folder / "keys", ["127.0.0.1", "localhost"], list(names.values()), 30, datetime.now(UTC))
        public = {"public": write_public(parts, folder)} if parts.task.public else {}
        for k, name in names.items():
            self.write_site(name, model=parts.cards[k].model, **write_images(parts, k, folder / name), **public)

    def write_site(self, name: str, **settings: Any) -> Path:
        """site.toml of a site."""
        base = {"name": name, "server": self.address, "keys": f"keys/sites/{name}", "state": f"{name}/state"}
        file = self.folder / f"{name}.toml"
        file.write_text(to_toml(base | {"device": "cpu", "threads": 1} | settings), encoding="utf-8")
        return file

    def write_server(self, **settings: Any) -> Path:
        """federation.toml."""
        file = self.folder / "federation.toml"
        base = {"sites": list(self.names.values()), "listen": self.address, "deadline": float(PATIENCE)}
        file.write_text(to_toml(base | settings), encoding="utf-8")
        return file

    def start(self, name: str, *command: object, env: Mapping[str, str] = os.environ) -> Process:
        """A program whose words end up in NAME.log."""
        log, one_thread = self.folder / f"{name}.log", {"OMP_NUM_THREADS": "1"}
        self._running[name] = start(command, log, log, env=dict(env) | SOURCE | one_thread)
        return self._running[name]

    def pluribus(self, name: str, *words: object) -> Process:
        """One of our commands."""
        return self.start(name, sys.executable, "-m", "pluribus", *words)

    def join(self, name: str) -> Process:
        """A site."""
        return self.pluribus(name, "join", "--config", self.folder / f"{name}.toml")

    def flwr(self, home: Path, *words: object) -> dict[str, Any]:
        """What Flower's command line answers to an operator."""
        name = "-".join(map(str, words[:2]))
        command = self.start(name, flower("flwr"), *words, "--format", "json", env=environment(home))
        assert command.wait(PATIENCE) == 0, self.said(name)
        return dict(json.loads(self.said(name)))

    def said(self, name: str) -> str:
        """What a program has said."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def until(self, done: Callable[[], Any]) -> None:
        """Wait until it is so."""
        end = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > end:
                words = "\n".join(f"== {log.name}\n{self.said(log.stem)[-3000:]}" for log in self.folder.glob("*.log"))
                raise AssertionError(f"it did not happen\n{words}")
            time.sleep(0.2)

    def kill(self, name: str) -> None:
        """SIGKILL for all of it at once, as if the power failed."""
        process = self._running.pop(name)
        for pid in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def process(self, name: str, called: str) -> int | None:
        """The process that is called so, of those that a program has started."""
        for pid in descendants(self._running[name].pid):
            with contextlib.suppress(OSError):
                _, comm, rest = re.split(r" \((.*)\) ", f" {Path(f'/proc/{pid}/stat').read_text()}", maxsplit=1)
                # Linux keeps 15 characters. Neither a zombie, nor the script that asks for a ClientApp and has its name
                if comm == called[:15] and rest[0] != "Z" and os.path.samefile(f"/proc/{pid}/exe", sys.executable):
                    return pid
        return None

    def signal(self, name: str, called: str, number: signal.Signals) -> None:
        """For one process of a program."""
        pid = self.process(name, called)
        assert pid is not None, f"{name} has no '{called}'"
        os.kill(pid, number)

    def rounds(self) -> list[dict[str, Any]]:
        """Those that the server has ended."""
        return read_lines(self.folder / "federation" / "metrics.jsonl")

    def close(self) -> None:
        """Kill whatever still runs."""
        for name in list(self._running):
            self.kill(name)

    def learned(self, k: int) -> dict[str, torch.Tensor]:
        """What a site has on its disk of its newest run."""
        return self._held(k, "[0-9]*")

    def selected(self, k: int) -> dict[str, torch.Tensor]:
        """What a site was measured with in the round that its validation data selects."""
        return self._held(k, "selected-*")

    def _held(self, k: int, name: str) -> dict[str, torch.Tensor]:
        files = (self.folder / self.names[k] / "state").glob(f"*/{name}.safetensors")
        with safe_open(max(files, key=lambda file: file.stat().st_mtime), framework="pt") as file:
            held = [name for name in file.keys() if name.startswith("state/")]  # noqa: SIM118
            names = [name for name in held if not name.startswith("state/momenta.")]  # which no round outlives
            return {name.removeprefix("state/"): file.get_tensor(name) for name in names}


class Puppet:
    """A site that joins as any other, but whose worker is this process: what goes back is as the test likes it."""

    def __init__(self, network: Network, name: str, changes: Mapping[int, Callable[[bytes], bytes]]) -> None:
        """`changes`: what becomes of the true answer in a round."""
        site = read_site(network.folder / f"{name}.toml")
        self._changes = changes
        self._handler = RequestHandler(Responder(load_resources(site)))
        self._place = tempfile.TemporaryDirectory(prefix="pluribus-")
        place = Path(self._place.name) / "worker"
        key = site.keys / f"{name}.key"
        self._node = Node(site, site.keys / "ca.crt", key, place, tell=lambda text: None)
        self._over = False
        self.asked = -1
        """The round that it has been asked to work in."""
        threading.Thread(target=serve, args=(place, self._answer, lambda: self._handler.over), daemon=True).start()
        self._watcher = threading.Thread(target=self._watch)  # programs end with the thread that started them
        self._watcher.start()

    def __enter__(self) -> Puppet:
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._watcher.join()
        self._place.cleanup()

    def _watch(self) -> None:
        while not self._over:
            self._node.watch()
            time.sleep(0.2)
        self._node.stop()

    def _answer(self, blob: bytes) -> bytes:
        head = unseal(blob).head
        answer = self._handler.answer(blob)
        if head["verb"] != "work":
            return answer
        self.asked = head["t"]
        return self._changes.get(self.asked, lambda true: true)(answer)


class Wire:
    """A network between a site and the server that can be cut."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._lines: list[socket.socket] = []
        self._whole = True
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Whoever is connected is cut off. Who comes then is heard and hung up on: Flower takes that for the end."""
        self._whole = False
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        self._lines.clear()

    def mend(self) -> None:
        """It works again."""
        self._whole = True

    def close(self) -> None:
        """Nobody comes any more."""
        self.cut()
        self._door.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = self._door.accept()
                threading.Thread(target=self._connect, args=(line,), daemon=True).start()

    def _connect(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            if not self._whole:
                line.recv(1 << 16)
                return
            with socket.create_connection(("127.0.0.1", self._to)) as there:
                self._lines += [line, there]
                back = threading.Thread(target=self._carry, args=(there, line), daemon=True)
                back.start()
                self._carry(line, there)
                back.join()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


def write_images(parts: Assembly, k: int, folder: Path) -> dict[str, str]:
    """What a client of a simulation holds, as files; settings of a site that name them."""
    folder.mkdir()
    for part in ("train", "val", "test"):
        write_npz(folder / f"{part}.npz", columns(parts, parts.data.rows(k)[part]))
    return {part: f"{folder.name}/{part}.npz" for part in ("train", "val", "test")}


def write_public(parts: Assembly, folder: Path) -> str:
    """What all clients of a simulation know, and who gave it."""
    public = parts.data.public
    owner = np.concatenate([np.full(len(data), k) for k, data in public.items()])
    rows = torch.cat([data.rows for data in public.values()])
    write_npz(folder / "public.npz", columns(parts, rows) | {"owner": owner})
    return "public.npz"


def columns(parts: Assembly, rows: torch.Tensor) -> dict[str, np.ndarray]:
    """Some rows of a gray data set, as a file has them."""
    x, y = parts.dataset.x[rows, 0].numpy(), parts.dataset.y[rows].numpy()
    return {"x_train": x, "y_train": y, "x_test": x[:0], "y_test": y[:0], "classes": np.array(parts.task.names)}


def descendants(pid: int) -> Iterator[int]:
    """Every process that this one has started, each before those that it has started.

    What a ClientApp is about to start, such as `uname`, still has its name.
    """
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield int(child)
            yield from descendants(int(child))

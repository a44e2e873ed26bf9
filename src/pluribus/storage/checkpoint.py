"""Full state of a run, written in cost proportional to the clients that changed.

Each commit is one file `round-NNNNNN.safetensors` with the server and the clients touched since the commit before; its
rename is the moment of truth. A client's newest state is in the newest file that names it, so the folder is its own
index. A file is deleted once neither the newest commit nor the one before it needs anything in it. Each commit also
notes the sum of all clients' newest rounds: a file that went missing would make it smaller.

`selected/` has a file per client: what it was measured with in the round that its validation data selects. A newer one
is written before the commit that counts on it, and the older one is deleted after it. So a commit needs two copies of a
client at most: its newest state and its selected model.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pluribus.errors import CheckpointError, DamagedFileError, OtherRunError
from pluribus.internal.state import restore
from pluribus.storage.files import write_tensors

Tensors = dict[str, Tensor]
SELECTED = "selected"
KEPT = re.compile(r"client-(?P<client>\d+)-round-(?P<round>\d+)")
READINGS = 5  # of a folder that another process writes to at the same time


class Checkpoint:
    """The `state/` folder of a run. One that is only read may be written to by another process meanwhile."""

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        self._folder = folder
        if not read_only:
            for temporary in (*folder.rglob("*.tmp"), *folder.rglob(".tmp*")):  # ours, and those of safetensors
                temporary.unlink()
        for reading in range(READINGS if read_only else 1):
            try:
                self._index_all()
                break
            except CheckpointError:
                if reading == READINGS - 1 or not read_only:
                    raise
        self._kept: dict[int, set[int]] = {}  # client -> rounds of which there is a file in selected/
        for path in folder.glob(f"{SELECTED}/client-*.safetensors"):
            if found := KEPT.fullmatch(path.stem):
                self._kept.setdefault(int(found["client"]), set()).add(int(found["round"]))
        self.doubled = {k for k, rounds in self._kept.items() if len(rounds) > 1}  # those with an older file, too

    def _index_all(self) -> None:
        self._where: dict[int, int] = {}  # client -> round of the file that holds its newest state
        self._holds: Counter[int] = Counter()  # round of a file -> number of clients whose newest state it holds
        self._stale: list[int] = []  # files that the newest commit no longer needs, but the one before it does
        self.latest: int | None = None
        self.threads: int | None = None
        noted = 0
        for path in sorted(self._folder.glob("round-*.safetensors")):
            noted = self._index(path)
        self._stale = [t for t, clients in self._holds.items() if not clients and t != self.latest]
        self._sum = sum(t + 1 for t in self._where.values())
        if self._sum != noted:
            raise DamagedFileError(
                f"{self._folder} lacks a file that round {self.latest} rests on. "
                f"Start again: pluribus run --config {self._folder.parent / 'config.toml'}"
            )

    def _index(self, path: Path) -> int:
        """Take a file in; returns the sum of rounds that it notes."""
        with _open(path) as file:
            facts = file.metadata() or {}
        try:
            t, threads, noted = (int(facts[name]) for name in ("round", "threads", "sum"))
            self._point(json.loads(facts["clients"]), t)
        except (KeyError, ValueError) as error:
            raise _damaged(path, error) from error
        self.latest, self.threads = t, threads
        return noted

    def _point(self, clients: list[int], t: int) -> list[int]:
        """Note where these clients are now; returns the files that nobody needs any more."""
        emptied = [] if self.latest is None or self._holds[self.latest] else [self.latest]
        for k in clients:
            old = self._where.get(k)
            if old is not None:
                self._holds[old] -= 1
                if not self._holds[old]:
                    emptied.append(old)
            self._where[k] = t
        self._holds[t] += len(clients)
        return emptied

    def commit(self, t: int, server: Tensors, clients: dict[int, Tensors], enrolled: dict[int, bytes]) -> None:
        """Make round t the one that a resumed run goes on from."""
        # copies, because safetensors refuses tensors that share memory
        tensors = {f"server/{name}": value.clone().contiguous() for name, value in server.items()}
        for k, state in clients.items():
            tensors |= {f"client/{k}/{name}": value for name, value in state.items()}
            if k in enrolled:
                tensors[f"enrolled/{k}"] = torch.frombuffer(bytearray(enrolled[k]), dtype=torch.uint8)
        threads = torch.get_num_threads()
        total = self._sum + sum(t - self._where.get(k, -1) for k in clients)
        facts = {"round": str(t), "clients": json.dumps(list(clients)), "threads": str(threads), "sum": str(total)}
        write_tensors(self._path(t), tensors, facts)
        self._sum = total
        stale, self._stale = self._stale, self._point(list(clients), t)
        self.latest, self.threads = t, threads
        for old in stale:
            self._path(old).unlink(missing_ok=True)

    # ---- selected rounds -------------------------------------------------------------------------------------------

    def keep(self, k: int, t: int, measured: Tensors) -> None:
        """Write what a client was measured with in round t, beside what was kept of it before."""
        path = self._selected_path(k, t)
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, measured, {"client": str(k), "round": str(t)})
        self._kept.setdefault(k, set()).add(t)
        if len(self._kept[k]) > 1:
            self.doubled.add(k)

    def drop_superseded(self, selected: Mapping[int, int]) -> None:
        """Leave of each client the round that it selects: after the commit that counts on it."""
        for k, t in selected.items():
            for old in self._kept[k] - {t}:
                self._selected_path(k, old).unlink(missing_ok=True)
            self._kept[k] = {t}
            self.doubled.discard(k)

    def selected(self, k: int, t: int) -> Tensors | None:
        """What a client was measured with in round t; None if that was not kept."""
        path = self._selected_path(k, t)
        return _tensors(path) if path.exists() else None

    def _selected_path(self, k: int, t: int) -> Path:
        return self._folder / SELECTED / f"client-{k:06d}-round-{t:06d}.safetensors"

    # ---- the latest commit -----------------------------------------------------------------------------------------

    def server(self) -> Tensors:
        """The server's state at the latest commit."""
        assert self.latest is not None
        return self._read(self.latest, "server/")

    def client(self, k: int) -> Tensors | None:
        """A client's state at the latest commit; None if it never took part."""
        return self._read(self._where[k], f"client/{k}/") if k in self._where else None

    def enrolled(self) -> dict[int, bytes]:
        """The enrolment messages so far; each is saved with its client."""
        messages: dict[int, bytes] = {}
        for t in sorted(set(self._where.values())):
            messages |= {int(k): bytes(value.numpy()) for k, value in self._read(t, "enrolled/").items()}
        return messages

    def _read(self, t: int, prefix: str) -> Tensors:
        return _tensors(self._path(t), prefix)

    def _path(self, t: int) -> Path:
        return self._folder / f"round-{t:06d}.safetensors"


def put_back(live: Tensors, saved: Tensors, whose: str) -> None:
    """Restore saved state in place; state of other code or other models gets a sentence."""
    try:
        restore(live, saved, whose)
    except (KeyError, ValueError) as error:
        raise OtherRunError(
            f"the saved state of {whose} does not fit its method and model as they are now ({error.args[0]}). "
            f"Use the code that wrote it, or start a new run."
        ) from error


def _tensors(path: Path, prefix: str = "") -> Tensors:
    with _open(path) as file:
        return {name[len(prefix) :]: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RuntimeError) as error:  # torch's, where a file goes away while it is opened
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged ({error}). Delete it and resume again: the run goes on from the commit before."
    )

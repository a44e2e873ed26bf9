"""The full state of a run. The cost of a commit is proportional to the number of clients that changed.

Each commit is one file `round-NNNNNN.safetensors` with the server and the clients that changed since the previous
commit. It takes effect when the file gets its final name. A client's newest state is in the newest file that names it,
so the folder needs no index. A file is deleted once neither the newest commit nor the previous one needs it. Each
commit also stores the sum of all clients' newest rounds: the sum is smaller if a file is missing.

`selected/` has one file per client: its state when it was evaluated in the round that its validation data selects, and
its predictions for its test rows (`test/label`, `test/predicted`, `test/row`). A new file is written before the commit
that relies on it, and the old file is deleted after that commit. So a commit needs at most two copies of a client: its
newest state and its selected model.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pluribus.errors import CheckpointError, DamagedFileError, OtherRunError
from pluribus.internal.state import restore
from pluribus.storage.files import write_tensors

Tensors = dict[str, Tensor]
SELECTED = "selected"
TESTED = "test/"  # prefix of the names of predictions
KEPT = re.compile(r"client-(?P<client>\d+)-round-(?P<round>\d+)")
READINGS = 5  # attempts to read a folder while another process writes to it


class Checkpoint:
    """The `state/` folder of a run. If it is read-only here, another process may write to it at the same time."""

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        self._folder = folder
        if not read_only:
            for temporary in (*folder.rglob("*.tmp"), *folder.rglob(".tmp*")):  # ours and those of safetensors
                temporary.unlink()
        for reading in range(READINGS if read_only else 1):
            try:
                self._index_all()
                break
            except CheckpointError:
                if reading == READINGS - 1 or not read_only:
                    raise
        self._kept: dict[int, set[int]] = {}  # client -> rounds that have a file in selected/
        for path in folder.glob(f"{SELECTED}/client-*.safetensors"):
            if found := KEPT.fullmatch(path.stem):
                self._kept.setdefault(int(found["client"]), set()).add(int(found["round"]))
        self.doubled = {k for k, rounds in self._kept.items() if len(rounds) > 1}  # clients with an older file, too

    def _index_all(self) -> None:
        self._newest: dict[int, int] = {}  # client -> round of the file that holds its newest state
        self._holds: Counter[int] = Counter()  # round of a file -> number of clients whose newest state it holds
        self._stale: list[int] = []  # files that the previous commit needs, but not the newest one
        self.latest: int | None = None
        self.threads: int | None = None
        stored = 0  # the sum in the newest file
        for path in sorted(self._folder.glob("round-*.safetensors")):
            with _open(path) as file:
                facts = file.metadata() or {}
            try:
                t, threads, stored = (int(facts[name]) for name in ("round", "threads", "sum"))
                self._update_index(json.loads(facts["clients"]), t)
            except (KeyError, ValueError) as error:
                raise _damaged_error(path, error) from error
            self.latest, self.threads = t, threads
        self._stale = [t for t, clients in self._holds.items() if not clients and t != self.latest]
        self._sum = sum(t + 1 for t in self._newest.values())
        if self._sum != stored:
            raise DamagedFileError(
                f"{self._folder} lacks a file that round {self.latest} needs. "
                f"Start again: pluribus run --config {self._folder.parent / 'config.toml'}"
            )

    def _update_index(self, clients: list[int], t: int) -> list[int]:
        """Set the newest round of these clients; returns the files that this commit no longer needs."""
        emptied = [] if self.latest is None or self._holds[self.latest] else [self.latest]
        for k in clients:
            if (old := self._newest.get(k)) is not None:
                self._holds[old] -= 1
                if not self._holds[old]:
                    emptied.append(old)
            self._newest[k] = t
        self._holds[t] += len(clients)
        return emptied

    def commit(self, t: int, server: Tensors, clients: dict[int, Tensors], enrolled: dict[int, bytes]) -> None:
        """Save round t. A resumed run continues after it."""
        # copies, because safetensors refuses tensors that share memory; a server may compute on a GPU
        tensors = {f"server/{name}": value.to("cpu", copy=True).contiguous() for name, value in server.items()}
        for k, state in clients.items():
            tensors |= {f"client/{k}/{name}": value for name, value in state.items()}
            if k in enrolled:
                tensors[f"enrolled/{k}"] = torch.frombuffer(bytearray(enrolled[k]), dtype=torch.uint8)
        threads = torch.get_num_threads()
        total = self._sum + sum(t - self._newest.get(k, -1) for k in clients)
        facts = {"round": str(t), "clients": json.dumps(list(clients)), "threads": str(threads), "sum": str(total)}
        write_tensors(self._path(t), tensors, facts)
        self._sum = total
        stale, self._stale = self._stale, self._update_index(list(clients), t)
        self.latest, self.threads = t, threads
        for old in stale:
            self._path(old).unlink(missing_ok=True)

    # ---- selected rounds -------------------------------------------------------------------------------------------

    def keep(self, k: int, t: int, measured: Tensors) -> None:
        """Save the state with which a client was evaluated in round t, and its predictions. Its older file stays."""
        path = self._selected_path(k, t)
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, measured, {"client": str(k), "round": str(t)})
        self._kept.setdefault(k, set()).add(t)
        if len(self._kept[k]) > 1:
            self.doubled.add(k)

    def drop_superseded(self, selected: dict[int, int]) -> None:
        """Delete the files of all rounds but the selected ones. Call this after the commit that relies on them."""
        for k, t in selected.items():
            for old in self._kept[k] - {t}:
                self._selected_path(k, old).unlink(missing_ok=True)
            self._kept[k] = {t}
            self.doubled.discard(k)

    def selected(self, k: int, t: int) -> Tensors | None:
        """The state with which a client was evaluated in round t; None if it was not kept."""
        path = self._selected_path(k, t)
        return without_predictions(_tensors(path)) if path.exists() else None

    def tested(self, k: int, t: int) -> Tensors:
        """A client's predictions for its test rows in round t; empty if they were not kept."""
        path = self._selected_path(k, t)
        return _tensors(path, TESTED) if path.exists() else {}

    def _selected_path(self, k: int, t: int) -> Path:
        return self._folder / SELECTED / f"client-{k:06d}-round-{t:06d}.safetensors"

    # ---- the latest commit -----------------------------------------------------------------------------------------

    def server(self) -> Tensors:
        assert self.latest is not None
        return _tensors(self._path(self.latest), "server/")

    def way_back(self) -> str:
        """How to go on if the server cannot be used as it was saved last. The files of the commit before are here."""
        assert self.latest is not None
        rounds = sorted(int(path.stem.removeprefix("round-")) for path in self._folder.glob("round-*.safetensors"))
        usable = [t for t in rounds[:-1][-1:] if self._is_finite(t)]
        if not usable:
            return "Start a new run: no earlier round can be resumed."
        return f"Delete {self._path(self.latest)} and start again: the run continues after round {usable[0]}."

    def _is_finite(self, t: int) -> bool:
        return all(bool(value.isfinite().all()) for value in _tensors(self._path(t), "server/").values())

    def client(self, k: int) -> Tensors | None:
        """A client's state at the latest commit; None if it never took part."""
        return _tensors(self._path(self._newest[k]), f"client/{k}/") if k in self._newest else None

    def enrolled(self) -> dict[int, bytes]:
        """All enrollment messages so far. Each one is saved with its client."""
        messages: dict[int, bytes] = {}
        for t in sorted(set(self._newest.values())):
            saved = _tensors(self._path(t), "enrolled/")
            messages |= {int(k): bytes(value.numpy()) for k, value in saved.items()}
        return messages

    def _path(self, t: int) -> Path:
        return self._folder / f"round-{t:06d}.safetensors"


def without_predictions(measured: Tensors) -> Tensors:
    """The tensors of a selected model alone."""
    return {name: value for name, value in measured.items() if not name.startswith(TESTED)}


def put_back(live: Tensors, saved: Tensors, whose: str) -> None:
    """Restore saved state in place. Refuse the state of other code or of another model."""
    try:
        restore(live, saved, whose)
    except (KeyError, ValueError) as error:
        raise OtherRunError(
            f"the saved state of {whose} does not fit its current method and model ({error.args[0]}). "
            f"Use the code that wrote it, or start a new run."
        ) from error


def _tensors(path: Path, prefix: str = "") -> Tensors:
    with _open(path) as file:
        return {name[len(prefix) :]: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: the file vanished while torch opened it
        raise _damaged_error(path, error) from error


def _damaged_error(path: Path, error: Exception) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged ({error}). Delete it and resume again: the run continues from the previous commit."
    )

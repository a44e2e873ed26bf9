"""A run in memory. It writes no file, and it is gone when its result is."""

from __future__ import annotations

from typing import Any

import torch

from pluribus.storage.checkpoint import TESTED, without_predictions
from pluribus.storage.folder import lines_until
from pluribus.storage.store import Lines, Tensors


class MemoryState:
    """The state of a run in memory."""

    def __init__(self) -> None:
        self.latest: int | None = None
        self.threads: int | None = None
        self.doubled: set[int] = set()
        self._server: Tensors = {}
        self._clients: dict[int, Tensors] = {}
        self._enrolled: dict[int, bytes] = {}
        self._selected: dict[int, dict[int, Tensors]] = {}  # client -> round -> state

    def commit(self, t: int, server: Tensors, clients: dict[int, Tensors], enrolled: dict[int, bytes]) -> None:
        self._server = {name: value.to("cpu", copy=True) for name, value in server.items()}  # its own go on changing
        self._clients |= clients  # copies already
        self._enrolled = dict(enrolled)
        self.latest, self.threads = t, torch.get_num_threads()

    def server(self) -> Tensors:
        return self._server

    def way_back(self) -> str:
        return "Start a new run: a run in memory keeps no earlier round."

    def client(self, k: int) -> Tensors | None:
        return self._clients.get(k)

    def enrolled(self) -> dict[int, bytes]:
        return dict(self._enrolled)

    def keep(self, k: int, t: int, measured: Tensors) -> None:
        self._selected.setdefault(k, {})[t] = measured
        if len(self._selected[k]) > 1:
            self.doubled.add(k)

    def selected(self, k: int, t: int) -> Tensors | None:
        measured = self._selected.get(k, {}).get(t)
        return None if measured is None else without_predictions(measured)

    def tested(self, k: int, t: int) -> Tensors:
        measured = self._selected.get(k, {}).get(t, {})
        return {name.removeprefix(TESTED): value for name, value in measured.items() if name.startswith(TESTED)}

    def drop_superseded(self, selected: dict[int, int]) -> None:
        for k, t in selected.items():
            self._selected[k] = {t: self._selected[k][t]}
            self.doubled.discard(k)


class MemoryRun:
    """The rounds and the state of one run in memory."""

    path = None

    def __init__(self) -> None:
        self.checkpoint = MemoryState()
        self._metrics: Lines = []
        self._traffic: Lines = []

    def history(self, until: int | None) -> tuple[Lines, Lines]:
        self._metrics, self._traffic = lines_until(self._metrics, until), lines_until(self._traffic, until)
        return list(self._metrics), list(self._traffic)

    def append(self, record: dict[str, Any], traffic: Lines) -> None:
        self._metrics.append(record)
        self._traffic += traffic

    def sync_lines(self) -> None:
        """Nothing to do: memory is not durable."""

    def write_result(self, summary: dict[str, Any]) -> None:
        """Nothing to do: the result itself is in memory."""

    def look_again(self) -> bool:
        return False  # no other process writes here

    def close(self) -> None:
        """Nothing to release."""

"""Where a run keeps its rounds and its state: in a folder, or in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

Tensors = dict[str, Tensor]
Lines = list[dict[str, Any]]


class StateStore(Protocol):
    """The newest saved state of the server and of every client, and the models of the selected rounds."""

    latest: int | None
    """The newest saved round; None: no round was saved."""
    threads: int | None
    """CPU threads in that round."""
    doubled: set[int]
    """Clients with more than one selected model."""

    def commit(self, t: int, server: Tensors, clients: dict[int, Tensors], enrolled: dict[int, bytes]) -> None:
        """Save round t. A resumed run continues after it."""

    def way_back(self) -> str:
        """What a person can do if the server cannot be used as it was saved last."""

    def server(self) -> Tensors: ...

    def client(self, k: int) -> Tensors | None:
        """A client's state at the latest commit; None if it never took part."""

    def enrolled(self) -> dict[int, bytes]:
        """All enrollment messages so far."""

    def keep(self, k: int, t: int, measured: Tensors) -> None:
        """Save the state with which a client was evaluated in round t."""

    def selected(self, k: int, t: int) -> Tensors | None:
        """The state with which a client was evaluated in round t; None if it was not kept."""

    def tested(self, k: int, t: int) -> Tensors:
        """A client's predictions for its test rows in round t; empty if they were not kept."""

    def drop_superseded(self, selected: dict[int, int]) -> None:
        """Delete the models of all rounds but the selected ones."""


class RunStore(Protocol):
    """The rounds and the state of one run."""

    @property
    def path(self) -> Path | None:
        """The run folder; None if the run is in memory."""

    @property
    def checkpoint(self) -> StateStore: ...

    def history(self, until: int | None) -> tuple[Lines, Lines]:
        """Rounds and transfers up to a committed round."""

    def append(self, record: dict[str, Any], traffic: Lines) -> None:
        """Add a round and its transfers."""

    def sync_lines(self) -> None:
        """Make the rounds so far durable, before the commit that relies on them."""

    def write_result(self, summary: dict[str, Any]) -> None:
        """Save the summary of the finished run."""

    def look_again(self) -> bool:
        """Read the newest commit of another process; returns whether there is a new one."""

    def close(self) -> None: ...

"""One client after the other, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pluribus.host import Host, Selected, Tensors, most_selected


class Serial:
    """The plain engine: what others must agree with, bit by bit."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.room: float = most_selected(host.device)

    def each(self, verb: str, jobs: Iterable[tuple[int, tuple[Any, ...]]]) -> Iterator[tuple[int, Any]]:
        """Do a host's verb for clients; answers in the order of jobs."""
        for k, args in jobs:
            yield k, getattr(self.host, verb)(*args)

    def changed(self) -> dict[int, Tensors]:
        """State of every client that worked since the last call."""
        return self.host.changed()

    def selected(self) -> dict[int, Selected]:
        """What clients were measured with in the rounds that were selected since the last call."""
        return self.host.selected()

    def pending(self) -> int:
        """How many clients wait to be saved."""
        return self.host.pending()

    def close(self) -> None:
        """Nothing to let go of."""

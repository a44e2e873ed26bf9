"""The interface of all engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from pluribus.host import Selected, Tensors
from pluribus.request import Answer, Request

MOST_PENDING = 256  # most clients with unsaved state that a crash may lose, or that processes keep


class Engine(Protocol):
    """Runs clients, and keeps their state until it is saved."""

    @property
    def room(self) -> float:
        """Bytes of selected models that may stay in memory until they are saved."""

    @property
    def can_lose(self) -> bool:
        """Whether clients can be lost while the run goes on. It then resumes from its last checkpoint."""

    def expect(self, clients: Iterable[int]) -> None:
        """Learn which clients will be asked next, to prepare them. It changes no answer."""

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Answer requests. Yields each client and its answer, in the order of requests.

        All requests have one type and one stage, and each client gets at most one.
        """

    def take_changed(self) -> dict[int, Tensors]:
        """Return the state of every client that worked since the last call, on the CPU. Called between rounds."""

    def take_selected(self) -> dict[int, Selected]:
        """Return the round and the measured model, on the CPU, of every client that selected a new round since the last
        call. Called while no client works."""

    def pending(self) -> int:
        """Number of clients with unsaved state."""

    def is_full(self) -> bool:
        """Whether unsaved state takes so much memory that it must be saved now."""

    def close(self) -> None:
        """End processes and threads."""

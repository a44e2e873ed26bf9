"""What an engine is, whatever it runs clients on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from pluribus.host import Selected, Tensors
from pluribus.request import Answer, Request


class Engine(Protocol):
    """Lets clients work, and keeps what they become until it is saved."""

    @property
    def room(self) -> float:
        """Bytes of selected models that may wait in memory."""

    def each(self, requests: Iterable[Request]) -> Iterator[tuple[int, Answer]]:
        """Let clients do what is asked; each client with its answer, in the order of requests.

        All requests are of one type and one stage, and no client is asked twice.
        """

    def changed(self) -> dict[int, Tensors]:
        """State of every client that worked since the last call, on the CPU. For use between rounds."""

    def selected(self) -> dict[int, Selected]:
        """Of every client that has selected another round since the last call, that round and what it was measured
        with, on the CPU. For use when nobody works."""

    def pending(self) -> int:
        """How many clients wait to be saved."""

    def close(self) -> None:
        """Let go of processes and threads."""

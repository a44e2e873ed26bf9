"""What an engine is, whatever it runs clients on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from pluribus.host import Selected, Tensors

Job = tuple[int, tuple[Any, ...]]  # a client, and the arguments of the host's verb


class Engine(Protocol):
    """Lets clients work, and keeps what they become until it is saved."""

    @property
    def room(self) -> float:
        """Bytes of selected models that may wait in memory."""

    def each(self, verb: str, jobs: Iterable[Job]) -> Iterator[tuple[int, Any]]:
        """Do a verb of a host (`work`, `teach`, `learn`, `evaluate`, `enrol`); answers in the order of jobs."""

    def changed(self) -> dict[int, Tensors]:
        """State of every client that worked since the last call, on the CPU. For use between rounds."""

    def selected(self) -> dict[int, Selected]:
        """Of every client that has selected another round since the last call, that round and what it was measured
        with, on the CPU. For use when nobody works."""

    def pending(self) -> int:
        """How many clients wait to be saved."""

    def close(self) -> None:
        """Let go of processes and threads."""

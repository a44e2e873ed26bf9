"""Where clients run. The round loop speaks to an engine; an engine hands its jobs to hosts, here or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from pluribus.assembly import Assembly
from pluribus.engines.serial import Serial
from pluribus.engines.workers import Workers
from pluribus.experiment import Experiment
from pluribus.host import Host, Limits, Selected, Tensors

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


def make_host(parts: Assembly, load: Callable[[int], Tensors | None], limits: Limits | None = None) -> Host:
    """A host that can host every client of a federation; `load` gives what was saved of one."""
    where = parts.data, parts.local, parts.device, load
    return Host(parts.method, parts.task, parts.cards, *where, parts.experiment.same_init, limits)


def engine_for(parts: Assembly, load: Callable[[int], Tensors | None], tell: Callable[[str], None]) -> Engine:
    """The engine that an experiment asks for. It says through `tell` what it could not do as fast as it would."""
    if parts.experiment.engine == "ray":
        from pluribus.engines.ray import Ray

        return Ray(parts, load, tell)
    workers = min(parts.experiment.workers, parts.experiment.clients)
    if workers > 1:
        return Workers(parts, load, workers)
    return local_engine(make_host(parts, load), parts.experiment, tell)


def local_engine(host: Host, experiment: Experiment, tell: Callable[[str], None]) -> Engine:
    """The engine for a host in this process."""
    if host.device.type == "cuda":
        from pluribus.engines.cuda import Cuda

        return Cuda(host, tell, experiment.capture, experiment.stack)
    return Serial(host)

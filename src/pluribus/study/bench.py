"""How fast a federation runs here, and where its time goes.

Every figure is from a real run. An observer times its rounds from the end of one to the end of the next, so that
records and checkpoints count. After each round the bare loop does the same work, and both are compared round by round:
what slows the machine down for a while slows both.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import resource
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from pluribus.api import run
from pluribus.assembly import Assembly
from pluribus.experiment import Experiment, experiment, flags
from pluribus.federation import Federation
from pluribus.internal.clock import SPANS
from pluribus.internal.ledger import Ledger
from pluribus.method import Method
from pluribus.result import Result
from pluribus.study.bare import BareLoop, now

ROUNDS = 5
WARM_UP = 1  # rounds that are not measured: clients come to life, kernels are chosen, steps are recorded
KINDS = (*SPANS, "other")


@dataclass(frozen=True)
class Round:
    """One round as it was measured."""

    seconds: float
    """Since the end of the round before, everything included."""
    spans: dict[str, float]
    """Seconds by kind; `other` is what the rest leaves of `seconds`."""
    samples: int
    """Training samples of all clients that took part, times epochs."""
    bytes: dict[str, int]
    bare: float | None
    """Seconds of the bare loop."""


@dataclass(frozen=True)
class Machine:
    """What the figures depend on besides the experiment."""

    engine: str
    device: str
    threads: int
    workers: int
    torch: str


@dataclass(frozen=True)
class Bench:
    """Figures per round: the median over the measured rounds. Shares are of all measured rounds together.

    >>> import pluribus                                             # doctest: +SKIP
    >>> report = pluribus.bench("fedgh", clients=20)                # doctest: +SKIP
    >>> report.seconds, report.shares["compute"], report.ratio      # doctest: +SKIP
    """

    experiment: Experiment
    architectures: int
    each: list[Round]
    memory: dict[str, int | None]
    """Most bytes at any time: `host` of this process and its workers, `gpu` of tensors on the GPU, if there is one."""
    machine: Machine
    folder: Path | None
    warnings: list[str]

    @property
    def seconds(self) -> float:
        """Of a round."""
        return statistics.median(r.seconds for r in self.each)

    @property
    def samples(self) -> float:
        """Training samples of a round."""
        return statistics.median(r.samples for r in self.each)

    @property
    def samples_per_second(self) -> float:
        """Training samples of a round by the seconds of a round."""
        return self.samples / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        """Of the time: compute, communication, server, evaluation and everything else."""
        whole = sum(r.seconds for r in self.each)
        return {kind: sum(r.spans[kind] for r in self.each) / whole for kind in KINDS}

    @property
    def bytes(self) -> dict[str, float]:
        """Of a round: `up`, `down`, and `evaluation` (downloads made only to measure)."""
        return {way: statistics.median(r.bytes[way] for r in self.each) for way in self.each[0].bytes}

    @property
    def bare_seconds(self) -> float | None:
        """Of the bare loop, for the work of a round."""
        known = [r.bare for r in self.each if r.bare is not None]
        return statistics.median(known) if known else None

    @property
    def ratio(self) -> float | None:
        """A round by its bare loop, the median over rounds."""
        known = [r.seconds / r.bare for r in self.each if r.bare]
        return statistics.median(known) if known else None

    @property
    def command(self) -> str:
        """What measures the same again."""
        bare = [] if self.bare_seconds is not None else ["--no-bare"]
        return shlex.join(["pluribus", "bench", self.experiment.method, *flags(self.experiment), *bare])

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "method": self.experiment.method,
            "data": self.experiment.data,
            "clients": self.experiment.clients,
            "seed": self.experiment.seed,
            "rounds": len(self.each),
            "warm_up": WARM_UP,
            "seconds": self.seconds,
            "samples": self.samples,
            "samples_per_second": self.samples_per_second,
            "shares": self.shares,
            "memory": self.memory,
            "bytes": self.bytes,
            "bare_seconds": self.bare_seconds,
            "ratio": self.ratio,
            **asdict(self.machine),
            "command": self.command,
            "folder": None if self.folder is None else str(self.folder),
            "warnings": self.warnings,
            "each": [asdict(r) for r in self.each],
        }

    def table(self) -> None:
        """Print the figures."""
        from pluribus.terminal import print_bench

        print_bench(self)


def bench(
    method: str | Method | type[Method] | Experiment | None = None,
    *,
    config: str | Path | None = None,
    rounds: int = ROUNDS,
    bare: bool = True,
    progress: bool = True,
    **settings: Any,
) -> Bench:
    """Time some rounds of a federation, after one that warms up, each beside a bare loop that does the same work.

    Arguments are those of `pluribus.run`. `rounds` is how many are measured, whatever an Experiment or a file says.
    The run's folder is deleted at the end unless `out` names one. `bare=False` leaves out the bare loop, which takes
    as long as the run.
    """
    described = replace(experiment(method, config, **settings), rounds=rounds)
    watch = _Watch(bare)
    with _folder(described.out) as out:
        result = run(replace(described, rounds=WARM_UP + rounds, out=out), progress=progress, observers=[watch])
    return Bench(
        described,
        watch.architectures,
        watch.rounds[WARM_UP:],
        {"host": watch.host_memory, "gpu": watch.gpu_memory},
        watch.machine,
        None if described.out is None else result.folder,
        result.warnings,
    )


@contextlib.contextmanager
def _folder(out: str | None) -> Iterator[str]:
    """The folder that was asked for, or one that is gone afterwards."""
    if out is not None:
        yield out
        return
    with TemporaryDirectory(prefix="pluribus-bench-") as temporary:
        yield temporary


class _Watch:
    """Times every round of a run, then lets the bare loop do the same work."""

    def __init__(self, bare: bool) -> None:
        self._wants_bare = bare
        self.rounds: list[Round] = []
        self.gpu_memory: int | None = None

    def start(self, federation: Federation) -> None:
        """Start the clock."""
        parts = federation.parts
        assert isinstance(parts, Assembly), "a benchmark is a simulation"
        self._federation, self._parts = federation, parts
        self._bare = BareLoop(parts) if self._wants_bare else None
        self.architectures = len(parts.cards.architectures())
        self.machine = Machine(
            engine=type(federation.engine).__name__.lower(),
            device=device_name(parts.device),
            threads=torch.get_num_threads(),
            workers=parts.experiment.workers,
            torch=torch.__version__,
        )
        self._go_on()

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        """Stop the clock while the bare loop runs."""
        if record["round"] < self._parts.task.warmup:  # no model trains: nothing to compare with
            self._go_on()
            return
        seconds = round(now(self._parts.device) - self._since, 6)
        self._note_gpu_memory()
        present, _ = self._federation.sampled(record["round"])
        samples = sum(self._parts.data.samples(k) for k in present) * self._parts.local.epochs
        spans = record["spans"] | {"other": seconds - sum(record["spans"].values())}
        bare = self._bare.round(present, map(int, record["clients"])) if self._bare else None
        self.rounds.append(Round(seconds, spans, samples, record["bytes"], bare))
        self._go_on()

    def finish(self, result: Result) -> None:
        """Ask for memory while the workers are still there."""
        self.host_memory = _host_memory()

    def _go_on(self) -> None:
        if self._parts.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._parts.device)  # what the bare loop took
        self._since = now(self._parts.device)

    def _note_gpu_memory(self) -> None:
        if self._parts.device.type == "cuda":
            self.gpu_memory = max(self.gpu_memory or 0, torch.cuda.max_memory_allocated(self._parts.device))


def _host_memory() -> int:
    """Most bytes of this process and of each worker, summed; what they share counts in each."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return own + sum(_high_water(child.pid) for child in multiprocessing.active_children())


def _high_water(pid: int | None) -> int:
    """Most bytes that a running process had; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def device_name(device: torch.device) -> str:
    """What a GPU or the processor is called."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

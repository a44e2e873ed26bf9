"""Measures how fast a federation runs on this machine, and what takes the time.

All results come from a real run. An observer measures each round from the end of the previous one, so records and
checkpoints are included. After each round the bare loop does the same work, and both are compared round by round: if
the machine is slow for a while, both are slow.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import torch

from pluribus.api import run
from pluribus.assembly import Assembly
from pluribus.engines.auto import Auto
from pluribus.experiment import Experiment, at_constant_rate, experiment, repeat
from pluribus.federation import Federation
from pluribus.internal.clock import SPANS
from pluribus.internal.devices import is_apple
from pluribus.internal.keywords import BenchSettings
from pluribus.internal.ledger import Ledger
from pluribus.internal.system import peak_memory
from pluribus.method import Method
from pluribus.result import Result
from pluribus.study.bare import BareLoop, now

ROUNDS = 5
WARM_UP = 1  # rounds that are not measured: clients are created, kernels chosen, steps captured
KINDS = (*SPANS, "other")
MEASURED = "seconds", "samples", "samples_per_second", "shares", "memory", "bytes", "bare_seconds", "ratio"


@dataclass(frozen=True)
class Round:
    """The measurements of one round."""

    seconds: float  # since the end of the previous round, overhead included
    spans: dict[str, float]  # seconds by kind; `other` is the remainder of `seconds`
    samples: int  # training samples of all participating clients, times epochs
    bytes: dict[str, int]
    bare: float | None  # seconds of the bare loop, if it ran


@dataclass(frozen=True)
class Machine:
    """Where an experiment was measured: everything else that its speed depends on."""

    engine: str
    device: str
    threads: int
    workers: int
    torch: str


@dataclass(frozen=True)
class Bench:
    """Results per round, as the median over the measured rounds. Shares refer to all measured rounds together.

    >>> import pluribus                                             # doctest: +SKIP
    >>> report = pluribus.bench("fedgh", clients=20)                # doctest: +SKIP
    >>> report.seconds, report.shares["compute"], report.ratio      # doctest: +SKIP
    """

    experiment: Experiment
    architectures: int
    each: list[Round]
    memory: dict[str, int | None]
    """Peak in bytes: `host` for this process and its workers, `gpu` for tensors on the GPU, or None without one."""
    machine: Machine
    folder: Path | None
    warnings: list[str]

    @property
    def seconds(self) -> float:
        return statistics.median(r.seconds for r in self.each)

    @property
    def samples(self) -> float:
        return statistics.median(r.samples for r in self.each)

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the time by kind: compute, communication, server, evaluation and other."""
        whole = sum(r.seconds for r in self.each)
        return {kind: sum(r.spans[kind] for r in self.each) / whole for kind in KINDS}

    @property
    def bytes(self) -> dict[str, float]:
        """Bytes of a round: `up`, `down`, and `evaluation` (downloads for evaluation only)."""
        return {way: statistics.median(r.bytes[way] for r in self.each) for way in self.each[0].bytes}

    @property
    def bare_seconds(self) -> float | None:
        """Time of the bare loop for the work of a round, if it ran."""
        known = [r.bare for r in self.each if r.bare is not None]
        return statistics.median(known) if known else None

    @property
    def ratio(self) -> float | None:
        """Time of a round divided by the time of its bare loop, as the median over rounds."""
        known = [r.seconds / r.bare for r in self.each if r.bare]
        return statistics.median(known) if known else None

    @property
    def command(self) -> str:
        """The command that repeats the measurement."""
        return repeat("bench", self.experiment, *([] if self.bare_seconds is not None else ["--no-bare"]))

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self.experiment, name) for name in ("method", "clients", "seed")},
            "data": self.experiment.data_name,
            "rounds": len(self.each),
            "warm_up": WARM_UP,
            **{name: getattr(self, name) for name in MEASURED},
            **asdict(self.machine),
            "command": self.command,
            "folder": None if self.folder is None else str(self.folder),
            "warnings": self.warnings,
            "each": [asdict(r) for r in self.each],
        }

    def table(self) -> None:
        from pluribus.terminal import print_bench

        print_bench(self)


def bench(
    method: str | Method | type[Method] | Experiment | None = None,
    *,
    config: str | Path | None = None,
    rounds: int = ROUNDS,
    bare: bool = True,
    progress: bool = True,
    **settings: Unpack[BenchSettings],
) -> Bench:
    """Measure some rounds of a federation after one warm-up round, and a bare loop that does the work of each round.

    Arguments are those of `pluribus.run`. `rounds` is the number of measured rounds; it overrides the rounds of an
    Experiment or a file. The learning rate is constant, because a schedule is for a whole run. The run folder is
    deleted at the end unless `out` names one. `bare=False` skips the bare loop, which takes as long as the run.
    """
    described = replace(at_constant_rate(experiment(method, config, **settings)), rounds=rounds)
    watch = _Watch(bare)
    temporary = TemporaryDirectory(prefix="pluribus-bench-") if described.out is None else None
    with temporary or contextlib.nullcontext(described.out) as out:
        result = run(replace(described, rounds=WARM_UP + rounds, out=out), progress=progress, observers=[watch])
    memory = {"host": watch.host_memory, "gpu": watch.gpu_memory}
    folder = None if temporary else result.folder
    each = watch.rounds[WARM_UP:]
    return Bench(described, watch.architectures, each, memory, watch.machine, folder, result.warnings)


class _Watch:
    """Observer that measures every round of a run, and the bare loop after it."""

    def __init__(self, bare: bool) -> None:
        self._wants_bare = bare
        self.rounds: list[Round] = []
        self.gpu_memory: int | None = None

    def start(self, federation: Federation) -> None:
        parts = federation.parts
        assert isinstance(parts, Assembly), "a benchmark is a simulation"
        self._federation, self._parts = federation, parts
        self._bare = BareLoop(parts) if self._wants_bare else None
        self.architectures = len(parts.cards.architectures())
        self._restart_clock()

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        if record["round"] < self._parts.task.warmup:  # no model trains, so there is no bare loop
            self._restart_clock()
            return
        seconds = round(now(self._parts.device) - self._since, 6)
        if self._parts.device.type == "cuda":
            self.gpu_memory = max(self.gpu_memory or 0, torch.cuda.max_memory_allocated(self._parts.device))
        present, _ = self._federation.sample_clients(record["round"])
        samples = sum(self._parts.data.samples(k) for k in present) * self._parts.local.epochs
        spans = record["spans"] | {"other": seconds - sum(record["spans"].values())}
        bare = self._bare.round(present, map(int, record["clients"])) if self._bare else None
        self.rounds.append(Round(seconds, spans, samples, record["bytes"], bare))
        self._restart_clock()

    def finish(self, result: Result) -> None:
        self.host_memory = _host_memory()  # now, because the workers still run
        engine, workers = _engine_of(self._federation)
        device, threads = device_name(self._parts.device), torch.get_num_threads()
        self.machine = Machine(engine, device, threads, workers, torch.__version__)

    def _restart_clock(self) -> None:
        if self._parts.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._parts.device)  # without the bare loop
        self._since = now(self._parts.device)


def _engine_of(federation: Federation) -> tuple[str, int]:
    """The engine that the last round ran on, and its number of processes."""
    engine = federation.engine
    if isinstance(engine, Auto):
        return ("workers", engine.workers) if engine.workers else ("serial", 1)
    return type(engine).__name__.lower(), federation.parts.experiment.processes()


def _host_memory() -> int | None:
    """Sum of the peak bytes of this process and its workers. Shared memory counts in each of them."""
    own = peak_memory()
    return None if own is None else own + sum(_high_water(child.pid) for child in multiprocessing.active_children())


def _high_water(pid: int | None) -> int:
    """Peak bytes of a running process, or 0 if the system does not report them."""
    return int(_find_line(f"/proc/{pid}/status", "VmHWM").removesuffix("kB") or 0) * 1024


def device_name(device: torch.device) -> str:
    """Product name of a GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if is_apple(device):
        return "Apple GPU (MPS)"
    return _find_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _find_line(file: str, name: str) -> str:
    """The value in the first line `NAME: VALUE` of a file, or an empty text."""
    with contextlib.suppress(OSError):
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""

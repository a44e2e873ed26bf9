"""Runs several experiments, one after the other in this process or in parallel processes.

A run that fails, or whose process dies, does not disturb the others. Every run saves its state in its folder, so all of
them may be killed at any time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pluribus.api import resume, run
from pluribus.data import Dataset
from pluribus.data.datasets import Key, load_once, load_shared
from pluribus.errors import PluribusError, UserCodeError
from pluribus.experiment import Experiment, check_portable
from pluribus.federation import Federation, Observer
from pluribus.internal.blame import sentence_of
from pluribus.internal.ledger import Ledger
from pluribus.internal.system import KILLED
from pluribus.processes import NAME, UNGUARDED, process_context, starting
from pluribus.result import Result
from pluribus.storage.code import remember_code
from pluribus.storage.files import write_text
from pluribus.track.tracker import Tracking

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

SENTENCE = (
    "parallel processes import this script again, and would run it again: move the code that runs under "
    "`if __name__ == '__main__':`, or set jobs to 1."
)

ALONE = Tracking()
FAILURES = (Exception, SystemExit)  # must not stop other runs; Ctrl-C must


class Progress(NamedTuple):
    """Rounds done, and the mean of the test metric if the last round was evaluated."""

    done: int
    score: float | None = None


class Watcher(Protocol):
    """Receives the progress of runs. `out` is the folder of a run."""

    def update(self, out: str, progress: Progress) -> None:
        """A run has started, or a round is done."""

    def finish(self, out: str, failed: bool) -> None:
        """A run has finished or failed."""


def run_all(experiments: Sequence[Experiment], jobs: int, watcher: Watcher, track: Tracking = ALONE) -> dict[str, str]:
    """Run or resume each experiment in its folder, `jobs` at a time. Return the reasons of failed runs by folder."""
    if jobs <= 1:
        return _one_by_one(experiments, watcher, track)
    return _side_by_side(experiments, jobs, watcher, track)


def run_or_resume(
    described: Experiment, progress: bool, observers: Sequence[Observer] = (), track: Tracking = ALONE
) -> Result:
    """Run an experiment, or resume it if its folder holds a run."""
    observers = [*observers, *track.make()]
    if (Path(described.out or "") / "config.toml").exists():
        remember_code(vars(described))
        again = described.objects()
        return resume(described.out or "", progress=progress, observers=observers, **again)
    return run(described, progress=progress, observers=observers)


def _finish_run(described: Experiment, report: Callable[[Progress], None], track: Tracking) -> None:
    traceback_path(described.out or "").unlink(missing_ok=True)
    run_or_resume(described, progress=False, observers=[_Reporter(report)], track=track)


def _explain(out: str, error: BaseException) -> str:
    """Say why a run failed. The traceback of an unexpected error is written beside the run folder."""
    if isinstance(error, PluribusError):
        return error.sentence
    with contextlib.suppress(OSError):  # for example a full disk
        write_text(traceback_path(out), "".join(traceback.format_exception(error)))
    return f"{sentence_of(error)}."


def traceback_path(out: str) -> Path:
    """The file of the traceback of a run that failed unexpectedly."""
    return Path(f"{out}.error.txt")


class _Reporter(Observer):
    """Observer that reports the progress of a run."""

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self._report = report

    def start(self, federation: Federation) -> None:
        self._view = federation.method.views[0]
        self._report(Progress(len(federation.history)))

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        score = record["mean"].get(self._view, {}).get("test", {}).get("mean")
        self._report(Progress(record["round"] + 1, score))


def _one_by_one(experiments: Sequence[Experiment], watcher: Watcher, track: Tracking) -> dict[str, str]:
    failed: dict[str, str] = {}
    for described in experiments:
        out = described.out or ""
        try:
            report = partial(watcher.update, out)
            _finish_run(described, report, track)
        except FAILURES as error:
            failed[out] = _explain(out, error)
        watcher.finish(out, failed=out in failed)
    return failed


def _side_by_side(experiments: Sequence[Experiment], jobs: int, watcher: Watcher, track: Tracking) -> dict[str, str]:
    check_portable(experiments, "set --jobs 1")
    experiments = list(map(_share_data, experiments))
    context, waiting, failed = process_context(), list(experiments), dict[str, str]()
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                described = waiting.pop(0)
                connection, process = _start(context, described, track)
                running[connection] = described.out or "", process
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                out, process = running[ready]
                message = _receive(ready, process)
                if isinstance(message, Progress):
                    watcher.update(out, message)
                    continue
                if message is not None:
                    failed[out] = message
                del running[ready]
                ready.close()
                process.join()
                watcher.finish(out, failed=message is not None)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return failed


def _start(
    context: ForkServerContext | SpawnContext, described: Experiment, track: Tracking
) -> tuple[Connection, BaseProcess]:
    ours, theirs = context.Pipe()
    args = theirs, described, _data(described), track
    # not a daemon, because a daemon may not start worker processes
    process = context.Process(target=_work, args=args, name=f"{NAME} {described.out}", daemon=False)
    with starting():
        process.start()
    theirs.close()  # otherwise the pipe stays open when the process ends
    return ours, process


def _share_data(described: Experiment) -> Experiment:
    """Move a data set that was given as an object to shared memory, so that it is not copied to every process."""
    return replace(described, data=described.data.shared()) if isinstance(described.data, Dataset) else described


def _data(described: Experiment) -> dict[Key, Dataset]:
    """Load the data of a run once for all processes. If this fails, the run itself reports the error."""
    if not isinstance(described.data, str):  # the experiment has it, or a function that the process calls
        return {}
    try:
        return load_shared(described.data, image_size=described.image_size, seed=described.seed)
    except FAILURES:
        return {}


def _receive(connection: Connection, process: BaseProcess) -> Progress | str | None:
    """Receive a message of a process. A text says why its run failed. None: it has finished."""
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except (EOFError, OSError):
        process.join()
    status = process.exitcode or 0
    if status == UNGUARDED:
        raise UserCodeError(SENTENCE)
    how = f"ended with status {status}. Its output says why"
    if status == KILLED:
        how = "was killed, perhaps because memory ran out: use fewer --jobs"
    elif status < 0:
        how = f"was stopped by {signal.Signals(-status).name}"
    return f"its process ({process.pid}) {how}."


def _work(connection: Connection, described: Experiment, data: dict[Key, Dataset], track: Tracking) -> None:
    """Run one experiment in a process. The process exits if its parent has died."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        try:
            with load_once(data):
                _finish_run(described, connection.send, track)
            failure = None
        except FAILURES as error:
            failure = _explain(described.out or "", error)
        connection.send(failure)
    except BrokenPipeError:
        os._exit(0)

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
from pluribus.errors import FileAccessError, PluribusError, UserCodeError, WorkerError
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
    """Rounds done, and the mean of the followed metric over clients if the last round was evaluated."""

    done: int
    score: float | None = None


class Failure(NamedTuple):
    """Why a run failed: the kind of the error, and its sentence."""

    kind: str
    reason: str


class Follow(NamedTuple):
    """What a watcher follows."""

    split: str = "test"
    view: str | None = None
    """None: the headline view of the method."""
    past: bool = False
    """Whether it learns again of the rounds before a resumed run stopped."""
    may_stop: bool = False
    """Whether it may stop runs. A run then waits for its answer after every round."""


HEADLINE = Follow()  # of the method, on test data


class StoppedError(Exception):
    """A watcher has stopped a run, which can be resumed."""


class Watcher(Protocol):
    """Receives the progress of runs. `out` is the folder of a run."""

    def update(self, out: str, progress: Progress) -> bool | None:
        """A run has started, or a round is done. True stops the run, if the watcher may do so."""

    def finish(self, out: str, failure: Failure | None) -> None:
        """A run has finished, failed or stopped."""


def run_all(experiments: Sequence[Experiment], jobs: int, watcher: Watcher, track: Tracking = ALONE) -> dict[str, str]:
    """Run or resume each experiment in its folder, `jobs` at a time. Return the reasons of failed runs by folder."""
    waiting = make_portable(experiments) if jobs > 1 else list(experiments)
    return run_queue(lambda: waiting.pop(0) if waiting else None, jobs, watcher, track)


def run_queue(
    take: Callable[[], Experiment | None],
    jobs: int,
    watcher: Watcher,
    track: Tracking = ALONE,
    follow: Follow = HEADLINE,
) -> dict[str, str]:
    """Run or resume the experiments that `take` returns, as `run_all` does. `follow` says what the watcher learns.

    If `take` returns None, there is no experiment now: it is called again when a run has ended. With several jobs, the
    experiments come from `make_portable`.
    """
    if jobs <= 1:
        return _one_by_one(take, watcher, track, follow)
    return _side_by_side(take, jobs, watcher, track, follow)


Report = Callable[[Progress], bool | None]


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


def _finish_run(described: Experiment, report: Report, track: Tracking, follow: Follow) -> None:
    traceback_path(described.out or "").unlink(missing_ok=True)
    with contextlib.suppress(StoppedError):
        run_or_resume(described, progress=False, observers=[_Reporter(report, follow)], track=track)


def _explain(out: str, error: BaseException) -> Failure:
    """Say why a run failed. The traceback of an unexpected error is written beside the run folder."""
    if isinstance(error, PluribusError):
        return Failure(error.kind, error.sentence)
    with contextlib.suppress(FileAccessError):  # for example a full disk
        write_text(traceback_path(out), "".join(traceback.format_exception(error)))
    return Failure(PluribusError.kind, f"{sentence_of(error)}.")


def traceback_path(out: str) -> Path:
    """The file of the traceback of a run that failed unexpectedly."""
    return Path(f"{out}.error.txt")


class _Reporter(Observer):
    """Observer that reports the progress of a run, and stops it if the answer is True."""

    def __init__(self, report: Report, follow: Follow) -> None:
        self._report = report
        self._follow = follow

    def start(self, federation: Federation) -> None:
        self._view = self._follow.view or federation.method.views[0]
        self._tell(Progress(len(federation.history)))
        for record in federation.history if self._follow.past else ():
            self._tell_round(record)

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        self._tell_round(record)

    def _tell_round(self, record: Mapping[str, Any]) -> None:
        self._tell(Progress(record["round"] + 1, score_of(record, self._view, self._follow.split)))

    def _tell(self, progress: Progress) -> None:
        if self._report(progress) and self._follow.may_stop:
            raise StoppedError


def score_of(record: Mapping[str, Any], view: str, split: str) -> float | None:
    """The headline metric of a round, mean over clients. None: the round was not evaluated, or cannot tell."""
    mean: float | None = record["mean"].get(view, {}).get(split, {}).get("mean")
    return mean


def _one_by_one(
    take: Callable[[], Experiment | None], watcher: Watcher, track: Tracking, follow: Follow
) -> dict[str, str]:
    failed: dict[str, str] = {}
    while (described := take()) is not None:
        out, failure = described.out or "", None
        try:
            _finish_run(described, partial(watcher.update, out), track, follow)
        except FAILURES as error:
            failure = _explain(out, error)
            failed[out] = failure.reason
        watcher.finish(out, failure)
    return failed


def _side_by_side(
    take: Callable[[], Experiment | None], jobs: int, watcher: Watcher, track: Tracking, follow: Follow
) -> dict[str, str]:
    context, failed = process_context(), dict[str, str]()
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    try:
        while True:
            while len(running) < jobs and (described := take()) is not None:
                _start(running, context, described, track, follow)
            if not running:
                return failed
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                out, process = running[ready]
                message = _receive(ready, process)
                if isinstance(message, Progress):
                    stop = watcher.update(out, message)
                    if follow.may_stop:
                        with contextlib.suppress(BrokenPipeError):  # the next message says why the process ended
                            ready.send(bool(stop))
                    continue
                if message is not None:
                    failed[out] = message.reason
                del running[ready]
                ready.close()
                process.join()
                watcher.finish(out, message)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _start(
    running: dict[Connection, tuple[str, BaseProcess]],
    context: ForkServerContext | SpawnContext,
    described: Experiment,
    track: Tracking,
    follow: Follow,
) -> None:
    """Start a run in a process, and add it to those that are running."""
    ours, theirs = context.Pipe()
    args = theirs, described, _data(described), track, follow
    # not a daemon, because a daemon may not start worker processes
    process = context.Process(target=_work, args=args, name=f"{NAME} {described.out}", daemon=False)
    with starting():
        process.start()
        running[ours] = described.out or "", process  # here, because Ctrl-C comes next: it would be left alone
    theirs.close()  # otherwise the pipe stays open when the process ends


def make_portable(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Refuse objects that other processes cannot get.

    A data set that was given as an object is moved to shared memory, so that it is not copied to every process.
    """
    check_portable(experiments, "set --jobs 1")
    return [replace(one, data=one.data.shared()) if isinstance(one.data, Dataset) else one for one in experiments]


def _data(described: Experiment) -> dict[Key, Dataset]:
    """Load the data of a run once for all processes. If this fails, the run itself reports the error."""
    if not isinstance(described.data, str):  # the experiment has it, or a function that the process calls
        return {}
    try:
        return load_shared(described.data, image_size=described.image_size, seed=described.seed)
    except FAILURES:
        return {}


def _receive(connection: Connection, process: BaseProcess) -> Progress | Failure | None:
    """Receive a message of a process. None: its run has finished or stopped."""
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
    return Failure(WorkerError.kind, f"its process ({process.pid}) {how}.")


def _work(
    connection: Connection,
    described: Experiment,
    data: dict[Key, Dataset],
    track: Tracking,
    follow: Follow,
) -> None:
    """Run one experiment in a process. The process exits if its parent has died."""

    def report(progress: Progress) -> bool:
        connection.send(progress)
        return bool(follow.may_stop and connection.recv())

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    failure = None
    try:
        try:
            with load_once(data):
                _finish_run(described, report, track, follow)
        except FAILURES as error:
            failure = _explain(described.out or "", error)
        connection.send(failure)
    except BrokenPipeError:
        os._exit(0)

"""Several runs, one after the other in this process or each in a process of its own.

A run that fails, or whose process dies, does not disturb the others. Every run keeps what it has in its folder, so that
all of them may be killed at any time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pluribus.api import resume, run
from pluribus.data import Dataset
from pluribus.data.datasets import Key, load_shared, loaded_once
from pluribus.errors import PluribusError, UserCodeError
from pluribus.experiment import Experiment
from pluribus.federation import Federation
from pluribus.internal.blame import sentence_of
from pluribus.internal.ledger import Ledger
from pluribus.processes import NAME, UNGUARDED, process_context, without_interrupts
from pluribus.result import Result
from pluribus.storage.files import write_text

SENTENCE = (
    "runs in processes of their own import this script anew, and would run it anew: put what runs under "
    "`if __name__ == '__main__':`, or set jobs to 1."
)


FAILURES = (Exception, SystemExit)  # all that one run can do to the others, but for Ctrl-C


class Progress(NamedTuple):
    """How far a run is: rounds done, and the mean test accuracy where the last of them was evaluated."""

    done: int
    accuracy: float | None = None


class Failure(NamedTuple):
    """Why a run did not come to its end."""

    sentence: str


class Watcher(Protocol):
    """Someone who is told how runs go. A run is known by its folder."""

    def moved(self, out: str, progress: Progress) -> None:
        """A run has begun, or a round is done."""

    def ended(self, out: str, failed: bool) -> None:
        """A run is over."""


def run_all(experiments: Sequence[Experiment], jobs: int, watcher: Watcher) -> dict[str, str]:
    """Run or resume each in its folder, so many at a time. Gives back why runs failed, by folder."""
    return _one_by_one(experiments, watcher) if jobs <= 1 else _side_by_side(experiments, jobs, watcher)


def _advance(described: Experiment, tell: Callable[[Progress], None]) -> None:
    """From wherever the run is to its end."""
    _traceback(described.out or "").unlink(missing_ok=True)
    if (Path(described.out or "") / "config.toml").exists():
        resume(described.out or "", progress=False, observers=[_Teller(tell)])
    else:
        run(described, progress=False, observers=[_Teller(tell)])


def _told(out: str, error: BaseException) -> str:
    """Why a run failed. Of what nobody foresaw, the kind, its first line and the nearest line of the user's own code;
    the traceback lies beside the run folder."""
    if isinstance(error, PluribusError):
        return str(error)
    place = _traceback(out)
    with contextlib.suppress(OSError):  # a full disk, say
        write_text(place, "".join(traceback.format_exception(error)))
    return f"{sentence_of(error)}. {place} has the traceback."


def _traceback(out: str) -> Path:
    return Path(f"{out}.error.txt")


class _Teller:
    """Watches a run and tells how far it is."""

    def __init__(self, tell: Callable[[Progress], None]) -> None:
        self._tell = tell

    def start(self, federation: Federation) -> None:
        self._view = federation.method.views[0]
        self._tell(Progress(len(federation.history)))

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        accuracy = record["mean"].get(self._view, {}).get("test", {}).get("mean")
        self._tell(Progress(record["round"] + 1, accuracy))

    def finish(self, result: Result) -> None:
        """Whoever started the run notices."""


# ---- in this process -------------------------------------------------------------------------------------------------


def _one_by_one(experiments: Sequence[Experiment], watcher: Watcher) -> dict[str, str]:
    failed: dict[str, str] = {}
    for described in experiments:
        out = described.out or ""
        try:
            _advance(described, lambda progress, out=out: watcher.moved(out, progress))  # type: ignore[misc]
        except FAILURES as error:
            failed[out] = _told(out, error)
        watcher.ended(out, failed=out in failed)
    return failed


# ---- in processes ----------------------------------------------------------------------------------------------------


class _Running(NamedTuple):
    out: str
    process: BaseProcess


def _side_by_side(experiments: Sequence[Experiment], jobs: int, watcher: Watcher) -> dict[str, str]:
    context, waiting, failed = process_context(), list(experiments), dict[str, str]()
    running: dict[Connection, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                described = waiting.pop(0)
                connection, process = _started(context, described)
                running[connection] = _Running(described.out or "", process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                one = running[ready]
                said = _heard(ready, one.process)
                if isinstance(said, Progress):
                    watcher.moved(one.out, said)
                    continue
                if said is not None:
                    failed[one.out] = said.sentence
                del running[ready]
                ready.close()
                one.process.join()
                watcher.ended(one.out, failed=said is not None)
    finally:
        for one in running.values():
            one.process.kill()
            one.process.join()
    return failed


def _started(context: ForkServerContext | SpawnContext, described: Experiment) -> tuple[Connection, BaseProcess]:
    ours, theirs = context.Pipe()
    # no daemon: those may not have worker processes of their own
    args = theirs, described, _data(described)
    process = context.Process(target=_work, args=args, name=f"{NAME} {described.out}", daemon=False)
    with without_interrupts():
        process.start()
    theirs.close()  # or the pipe would stay open when the process ends
    return ours, process


def _data(described: Experiment) -> dict[Key, Dataset]:
    """The data of a run, decoded here once for all processes. What cannot be loaded here, the run itself tells."""
    try:
        return load_shared(described.data, image_size=described.image_size, seed=described.seed)
    except FAILURES:
        return {}


def _heard(connection: Connection, process: BaseProcess) -> Progress | Failure | None:
    """What a process says; None where it has done its work."""
    try:
        said: Progress | Failure | None = connection.recv()
    except (EOFError, OSError):
        process.join()
        if process.exitcode == UNGUARDED:
            raise UserCodeError(SENTENCE) from None
        return Failure(_how_it_ended(process))
    return said


def _how_it_ended(process: BaseProcess) -> str:
    status = process.exitcode or 0
    if status == -signal.SIGKILL:
        return f"its process ({process.pid}) was killed, perhaps because memory ran out: use fewer --jobs."
    if status < 0:
        return f"its process ({process.pid}) was ended by {signal.Signals(-status).name}."
    return f"its process ({process.pid}) ended with status {status}: what it printed says why."


def _work(connection: Connection, described: Experiment, data: dict[Key, Dataset]) -> None:
    """What a process does. It ends with its parent: nobody listens then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        try:
            with loaded_once(data):
                _advance(described, connection.send)
            said = None
        except FAILURES as error:
            said = Failure(_told(described.out or "", error))
        connection.send(said)
    except BrokenPipeError:
        os._exit(0)

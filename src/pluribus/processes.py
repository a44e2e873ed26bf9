"""Start processes: quickly, without Ctrl-C, and without running the user's script again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING

from pluribus.errors import UserCodeError
from pluribus.internal.system import IS_POSIX

if TYPE_CHECKING:  # Windows has no fork server
    from multiprocessing.context import ForkServerContext, SpawnContext

NAME = "pluribus worker"
ELSEWHERE = ("pluribus.report", "pluribus.sites")  # no worker needs them, and they import Matplotlib and Flower
UNGUARDED = 64  # exit status of a worker that was about to run a federation itself
SENTENCE = (
    "worker processes import this script, and would run it again: put the code that runs under "
    "`if __name__ == '__main__':`, or leave out --workers."
)


def process_context() -> ForkServerContext | SpawnContext:
    """The context that starts processes with one thread: by a fork server that has imported everything, if possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    ours = [name for name in sys.modules if name.startswith("pluribus.") and not name.startswith(ELSEWHERE)]
    context.set_forkserver_preload([*ours, *(["timm"] if "timm" in sys.modules else [])])
    return context


@contextmanager
def starting(script: bool = True) -> Iterator[None]:
    """Processes started in this block never get Ctrl-C, which a terminal sends to all. This process gets it on exit.

    `script` says whether they import the user's script, for what it defines.
    """
    with _one_at_a_time, nullcontext() if script else _without_script():
        if not IS_POSIX:  # Windows cannot block Ctrl-C: each process ignores it once it runs
            yield
            return
        resource_tracker.ensure_running()  # first, because its start unblocks Ctrl-C
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_one_at_a_time = Lock()  # threads that start processes would see each other's stand-in


@contextmanager
def _without_script() -> Iterator[None]:
    """Replace the main module by one that has everything but a file, which new processes would import."""
    main = sys.modules["__main__"]
    stand_in = ModuleType(main.__name__)
    vars(stand_in).update({name: one for name, one in vars(main).items() if name not in ("__file__", "__spec__")})
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def check_guarded() -> None:
    """Refuse to run a federation while a worker process imports the user's script."""
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # set during the import; multiprocessing checks it, too
        return
    if process.name.startswith(NAME):
        os._exit(UNGUARDED)  # silently: the parent reports it once for all workers
    raise UserCodeError(SENTENCE)

"""How processes start: quickly, deaf to Ctrl-C, and without running the user's script again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext

from pluribus.errors import UserCodeError

NAME = "pluribus worker"
UNGUARDED = 64  # exit status of a worker that was about to become a parent
SENTENCE = (
    "worker processes import this script anew, and would run it anew: put what runs under "
    "`if __name__ == '__main__':`, or leave out --workers."
)


def process_context() -> ForkServerContext | SpawnContext:
    """Processes that begin with one thread: by a server that has imported everything, where there is such a thing."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    ours = [name for name in sys.modules if name.startswith("pluribus.") or name == "timm"]
    context.set_forkserver_preload([*ours, "torch._dynamo"])  # what torch imports when the first optimiser is made
    return context


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that start meanwhile never hear of Ctrl-C, which a terminal sends to all; here it waits."""
    resource_tracker.ensure_running()  # before: it lets Ctrl-C through again once it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check_guarded() -> None:
    """A script that worker processes import anew must not run a federation by being imported."""
    process = multiprocessing.current_process()
    if not getattr(process, "_inheriting", False):  # set while the script is imported, as multiprocessing's own check
        return
    if process.name.startswith(NAME):
        os._exit(UNGUARDED)  # silently: the parent says it once for all workers
    raise UserCodeError(SENTENCE)

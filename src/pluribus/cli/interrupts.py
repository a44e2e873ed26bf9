"""Handle Ctrl-C: a program that is still importing ends at once, any other one cleans up first."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any

from pluribus.errors import CheckpointError

if TYPE_CHECKING:
    from pluribus.cli.greeter import Greeter

at_work = threading.Event()  # set once something runs that Ctrl-C must clean up


@contextlib.contextmanager
def end_imports_on_ctrl_c() -> Iterator[None]:
    """Ctrl-C while a module is imported ends the program at once, unless there is something to clean up.

    Otherwise KeyboardInterrupt is raised inside that module: torch and numpy turn it into another error, or swallow it.
    """
    is_main = threading.current_thread() is threading.main_thread()  # only there can signals be handled
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or of other code
        yield
        return
    at_work.clear()
    signal.signal(signal.SIGINT, _handle_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _handle_ctrl_c(number: int, frame: FrameType | None) -> None:
    is_importing = any(one.f_code.co_filename.startswith("<frozen importlib") for one, _ in walk_stack(frame))
    if is_importing and not (at_work.is_set() or multiprocessing.active_children()):
        print("\nstopped.", file=sys.stderr, flush=True)
        os._exit(130)
    signal.default_int_handler(number, frame)


@contextlib.contextmanager
def resumable(greeter: Greeter) -> Any:
    """If a run is interrupted, say how to resume it."""
    try:
        yield
    except (KeyboardInterrupt, CheckpointError) as error:
        if (run := greeter.run) is None:
            raise
        from pluribus.storage.code import how_to_resume

        again = how_to_resume(run.path, greeter.settings)
        stopped = isinstance(error, KeyboardInterrupt)
        before = "Resume with:" if stopped else f"{error} {_saved_text(run.checkpoint.latest)}"
        raise type(error)(f"{before} {again}") from error


def _saved_text(latest: int | None) -> str:
    """Which rounds are saved. The command that resumes follows."""
    if latest is None:
        return "No round is saved yet. Once this is fixed, start again:"
    rounds = "Round 0 is" if latest == 0 else f"Rounds 0 to {latest} are"
    return f"{rounds} saved. Once this is fixed, continue:"


@contextlib.contextmanager
def say_how_to_resume(command: str) -> Any:
    """If Ctrl-C or SIGTERM stops this block, clean up, and say how to resume."""
    at_work.set()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the signal that stops a service
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"Resume with: {command}") from stop
    finally:
        signal.signal(signal.SIGTERM, before)

"""Command lines and programs in real processes: a launcher imports torch once, then forks a process for each.

process = start("run", "fedgh", "--out", "folder")
process.kill()
"""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing.process
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn


class Process:
    """One program at work. Its standard output and error end up in files."""

    def __init__(self, launcher: Launcher, pid: int, printed: Mapping[str, str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """The exit status if it has been seen to end; a signal is its negative number."""
        self._launcher = launcher
        self._printed = printed

    def poll(self) -> int | None:
        """The exit status if it has ended."""
        if self.returncode is None:
            self.returncode = self._launcher.ask(do="poll", pid=self.pid)
        return self.returncode

    def wait(self, seconds: float = float("inf")) -> int:
        """The exit status, once it has ended."""
        end = time.monotonic() + seconds
        while (status := self.poll()) is None:
            assert time.monotonic() < end, f"process {self.pid} has not ended"
            time.sleep(0.02)
        return status

    def kill(self) -> int:
        """SIGKILL: no handler runs, nothing is flushed."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    @property
    def out(self) -> str:
        return Path(self._printed["out"]).read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return Path(self._printed["err"]).read_text(encoding="utf-8")


class Launcher:
    """A process with everything imported and one thread, which forks. It ends with the process that made it.

    `first` is a program that it runs instead of its imports: what that leaves is what its forks find.
    """

    def __init__(self, first: str | None = None, script: str = __file__, env: Mapping[str, str] | None = None) -> None:
        """`script` serves it."""
        self.logs = tempfile.TemporaryDirectory(prefix="pluribus-processes-")
        self._lock = threading.Lock()  # federations run beside each other
        one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        self._server = subprocess.Popen(
            [sys.executable, script, *([] if first is None else [first])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.logs.name,
            env=os.environ | one_thread | dict(env or {}),
        )

    def ask(self, **command: Any) -> Any:
        """One line there, one line back."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._lock:
            self._server.stdin.write(json.dumps(command) + "\n")
            self._server.stdin.flush()
            return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        """End, and kill the processes that still run."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self.logs.cleanup()


_launcher = cache(Launcher)
_numbers = itertools.count()


def start(
    *argv: object,
    program: str | None = None,
    launcher: Launcher | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    terminal: str | None = None,
    leads: bool = False,
    die_at_sync: int | None = None,
    largest_file: int | None = None,
    dies_when_full: bool = False,
) -> Process:
    """`pluribus ARGV` in a process of its own, or the text of a program with these arguments.

    Standard error goes to a `terminal`, if there is one. Who `leads` has a group of its own, and ends as Python
    ends: it waits for its threads and calls what is registered for the exit. Others end at once. A process may kill
    itself just before a certain fsync, or have a full disk.
    """
    launcher, number = launcher or _launcher(), next(_numbers)
    printed = {name: str(Path(launcher.logs.name) / f"{number}.{name}") for name in ("out", "err")}
    for name in printed.values():
        Path(name).touch()  # may be read before the process has begun
    if terminal is not None:
        printed["err"] = terminal
    how = {"die_at_sync": die_at_sync, "largest_file": largest_file, "dies_when_full": dies_when_full, "leads": leads}
    where = {"cwd": str(cwd or launcher.logs.name), "env": dict(env or {}), **printed}
    pid = launcher.ask(do="start", argv=[str(word) for word in argv], program=program, **where, **how)
    return Process(launcher, pid, printed)


LONGEST = 120  # seconds that a command may take before it is killed: a test that waits for it then fails


# ---- the other side ------------------------------------------------------------------------------------------------


FORK, KILL = os.fork, signal.SIGKILL  # which the first program of a launcher may take away


def serve(start: Callable[[dict[str, Any]], int]) -> None:
    """Start processes for a launcher, and say how they have ended. `start` returns a process id."""
    at_work = set[int]()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "start":
            answer: int | None = start(command)
            at_work.add(answer)
        else:
            pid, status = os.waitpid(command["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            at_work.discard(pid)
        print(json.dumps(answer), flush=True)
    for pid in at_work:  # of a test that failed
        os.kill(pid, KILL)


def _serve(first: str | None = None) -> None:
    if first is None:
        _import_everything()
    else:
        exec(first, {"__name__": "__main__"})
    serve(lambda command: FORK() or _become(command))


def _import_everything() -> None:
    import torch

    import pluribus
    from pluribus import cli  # noqa: F401  so that no fork has to import it

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:  # torch imports much of itself only when something trains
        pluribus.run("fedgh", clients=2, rounds=1, out=out, progress=False)


def _become(command: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        for stream, name in ((0, os.devnull), (1, command["out"]), (2, command["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), stream)
        # a shell that runs the tests in the background has them, and so this process, ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(LONGEST)
        os.environ.update(command["env"])
        os.chdir(command["cwd"])
        multiprocessing.process.ORIGINAL_DIR = command["cwd"]  # where worker processes begin
        if command["leads"]:
            os.setsid()
        if command["die_at_sync"] is not None:
            _die_at_sync(command["die_at_sync"])
        if command["largest_file"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (command["largest_file"],) * 2)
        if command["dies_when_full"]:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        code = _status_of(command["program"], command["argv"])
        if command["leads"]:
            threading._shutdown()  # type: ignore[attr-defined]  as at the end of Python
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _status_of(program: str | None, argv: list[str]) -> int:
    try:
        if program is None:
            from pluribus import cli

            return cli.main(argv)
        sys.argv = ["-c", *argv]
        exec(program, {"__name__": "__main__"})
        return 0
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _die_at_sync(number: int) -> None:
    real, left = os.fsync, number

    def fsync(handle: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(handle)

    os.fsync = fsync


if __name__ == "__main__":
    _serve(*sys.argv[1:])

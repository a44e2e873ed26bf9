"""Python programs in real processes, without an interpreter's start for each: forks of one that has imported much.

A launcher imports torch, Flower and Pluribus once. A program that it starts is its fork, and what this program starts
by `python -m` is a fork of it. Parents, sessions, signals, descriptors and names are those of programs as usual.
`processes.py` is for single commands, whose own programs start as they do for users.
"""

from __future__ import annotations

import gc
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pluribus
from pluribus.sites.flower.programs import BIN, QUIET
from processes import Launcher, Process, serve

SOURCE = {"PYTHONPATH": str(Path(pluribus.__file__).parent.parent)}


@cache
def _launcher() -> Launcher:
    return Launcher(script=__file__, env=QUIET | SOURCE)


def start(command: Sequence[object], out: Path, err: Path, env: Mapping[str, str], cwd: Path | None = None) -> Process:
    """Start a program in a session of its own. Its words are added to these files, which may be the same."""
    launcher, printed = _launcher(), {"out": str(out), "err": str(err)}
    words, where = list(map(str, command)), str(cwd or Path.cwd())
    pid = launcher.ask(do="start", command=words, env=dict(env), cwd=where, **printed)
    return Process(launcher, pid, printed)


# ---- the other side ------------------------------------------------------------------------------------------------


def _serve() -> None:
    import torch

    from pluribus.sites.flower.forkserver import STARTED, program

    torch.set_num_threads(1)
    for name in ("cli", "sites.serve", "sites.trainer", "sites.flower.gate"):  # so that no fork has to import it
        import_module(f"pluribus.{name}")
    for name in {"flwr", *STARTED, *(one for started in STARTED.values() for one in started)}:
        program(name)
    with tempfile.TemporaryDirectory() as folder:  # torch imports much of itself only when something trains
        pluribus.run("fedgh", clients=2, rounds=1, out=folder, progress=False)
    subprocess.Popen = Forking  # type: ignore[assignment, misc]
    gc.freeze()  # otherwise the collector would copy all of this into each fork
    serve(_start)


def _start(command: Mapping[str, Any]) -> int:
    with open(command["out"], "ab") as out, open(command["err"], "ab") as err:
        how = {"cwd": command["cwd"], "env": command["env"], "start_new_session": True}
        process = Forking(command["command"], stdin=subprocess.DEVNULL, stdout=out, stderr=err, **how)
    _started.append(process)  # otherwise the next one would wait for it in our place
    return process.pid


_started: list[subprocess.Popen[bytes]] = []


class Forking(subprocess.Popen):  # type: ignore[type-arg]
    """Runs modules of Python, and programs of Flower, in forks of this process."""

    def __init__(self, args: Sequence[str], *, env: Mapping[str, str] | None = None, **how: Any) -> None:
        first = how.pop("preexec_fn", None)

        def run() -> None:
            """Stand where the fork would become another program. This never returns."""
            if first is not None:
                first()
            _become(args, dict(os.environ if env is None else env))

        is_module = list(args[:2]) == [sys.executable, "-m"]
        is_flower = args[0].startswith((f"{BIN}/flwr", f"{BIN}/flower-"))
        super().__init__(args, env=env, preexec_fn=run if is_module or is_flower else first, **how)


def _become(command: Sequence[str], env: dict[str, str]) -> NoReturn:
    """Run a program as an interpreter would, from its start to its exit status."""
    status = 1
    try:
        _begin(env)
        status = _run(command)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _begin(env: dict[str, str]) -> None:
    """Forget what a new interpreter would not have from its parent."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))  # the old one may have read ahead
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    gc.enable()  # subprocess disables it before it forks


def _run(command: Sequence[str]) -> int:
    try:
        if command[0] == sys.executable:
            sys.argv, sys.path[0] = list(command[2:]), os.getcwd()
            sys.modules.pop(sys.argv[0], None)  # runpy warns of a module that it runs a second time
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = list(command), str(BIN)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    _serve()

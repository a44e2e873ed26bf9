"""Flower's SuperLink and SuperNode, and what they start, as forks of one process that has imported Flower.

Flower starts a process for every message, and importing Flower takes each of them two seconds of computing. It finds
its programs by their bare names. So a folder that comes first on the PATH has scripts of these names; they write their
arguments to a pipe, and the process that reads it forks.

python -m pluribus.sites.flower.nursery FOLDER flower-supernode [its flags]
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpcore  # noqa: F401  which httpx, that all of them use, would import in each fork

from pluribus.sites.flower.programs import be_called, end_with_parent

Work = Callable[[], Any]
STARTED = {
    "flower-superlink": ("flower-superexec", "flwr-serverapp"),
    "flower-supernode": ("flower-superexec", "flwr-clientapp"),
}

# "$*" has a tab between the arguments, and a short line reaches a pipe as a whole.
SCRIPT = """\
#!/bin/sh
IFS='\t'
printf '%s\\n' "{name}\t$*" >{pipe}
"""


def main(arguments: list[str]) -> None:
    """Run it; with its loop, all of it ends.

    When a SuperNode gives up on a broken network its loop returns, but a thread that it started would keep its process
    alive for ever, deaf to the server, and nobody would start it again.
    """
    folder, name, *flags = arguments
    work = program(name)
    fork_by_name({started: program(started) for started in STARTED[name]}, Path(folder))
    be_called(name)
    sys.argv = [name, *flags]
    work()
    os._exit(1)


def program(name: str) -> Work:
    """What one of Flower's programs does, imported."""
    (found,) = entry_points(group="console_scripts", name=name)
    work: Work = found.load()
    return work


def fork_by_name(programs: Mapping[str, Work], folder: Path) -> None:
    """From now on, whoever descends from this process and starts one of these programs gets a fork.

    This process ends if that is no longer so.
    """
    pipe = folder / "pipe"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    for name in programs:
        script = folder / name
        script.write_text(SCRIPT.format(name=name, pipe=shlex.quote(str(pipe))), encoding="utf-8")
        script.chmod(0o700)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    nursery = fork("pluribus-forks", lambda: _fork_on_demand(pipe, programs))
    signal.signal(signal.SIGCHLD, lambda *_: _end_without(nursery))


def _fork_on_demand(pipe: Path, programs: Mapping[str, Work]) -> None:
    signal.signal(signal.SIGCHLD, lambda *_: _bury())
    with open(os.open(pipe, os.O_RDWR), encoding="utf-8") as lines:  # for writing, too: without a writer it would end
        for line in lines:
            sys.argv = line.removesuffix("\n").split("\t")
            fork(sys.argv[0], programs[sys.argv[0]])


def fork(name: str, work: Work) -> int:
    """A process of this name that does this work, and does not outlive us."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        be_called(name)
        work()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:  # and nothing else: what comes after this in the code is for the process that we come from
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _bury() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_without(nursery: int) -> None:
    if os.waitpid(nursery, os.WNOHANG)[0]:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

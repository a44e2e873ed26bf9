"""A fork server for Flower: its programs are forks of one process that has imported Flower.

Flower starts a process for every message, and each process would need two seconds of CPU time to import Flower. Flower
finds its programs by name on the PATH. So the first folder on the PATH holds scripts with these names. A script writes
its arguments to a pipe, and the process that reads the pipe forks.

python -m pluribus.sites.flower.forkserver FOLDER flower-supernode [flags of the program]
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpcore  # noqa: F401  otherwise httpx imports it in each fork

from pluribus.sites.flower.programs import end_with_parent, set_process_name

Work = Callable[[], Any]
STARTED = {
    "flower-superlink": ("flower-superexec", "flwr-serverapp"),
    "flower-supernode": ("flower-superexec", "flwr-clientapp"),
}

# IFS puts a tab between the arguments in "$*". A write of a short line to a pipe is atomic.
SCRIPT = """\
#!/bin/sh
IFS='\t'
printf '%s\\n' "{name}\t$*" >{pipe}
"""


def main(arguments: list[str]) -> None:
    """Run a program of Flower, and exit when it returns.

    When a SuperNode gives up on a broken network, its main loop returns. A thread would keep the process alive without
    a connection, and `pluribus join` would not restart it.
    """
    folder, name, *flags = arguments
    work = program(name)
    fork_by_name({started: program(started) for started in STARTED[name]}, Path(folder))
    set_process_name(name)
    sys.argv = [name, *flags]
    work()
    os._exit(1)


def program(name: str) -> Work:
    """Import the main function of one of Flower's programs."""
    (found,) = entry_points(group="console_scripts", name=name)
    work: Work = found.load()
    return work


def fork_by_name(programs: Mapping[str, Work], folder: Path) -> None:
    """Fork when this process or a descendant starts one of these by name. Exit if the fork server dies."""
    pipe = folder / "pipe"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    for name in programs:
        script = folder / name
        script.write_text(SCRIPT.format(name=name, pipe=shlex.quote(str(pipe))), encoding="utf-8")
        script.chmod(0o700)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    server = fork("pluribus-forks", lambda: _fork_on_demand(pipe, programs))
    signal.signal(signal.SIGCHLD, lambda *_: _exit_without(server))


def _fork_on_demand(pipe: Path, programs: Mapping[str, Work]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    with open(os.open(pipe, os.O_RDWR), encoding="utf-8") as lines:  # O_RDWR: without a writer the pipe would end
        for line in lines:
            sys.argv = line.removesuffix("\n").split("\t")
            fork(sys.argv[0], programs[sys.argv[0]])


def fork(name: str, work: Work) -> int:
    """Start a process with this name. It ends with the process that started it. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with_parent()
        set_process_name(name)
        work()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:  # the code after this call belongs to the parent
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _exit_without(server: int) -> None:
    if os.waitpid(server, os.WNOHANG)[0]:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])

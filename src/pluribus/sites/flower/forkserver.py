"""A fork server for Flower: its programs are forks of one process that has imported Flower.

Flower starts a process for every message, and each process would need two seconds of CPU time to import Flower. Flower
finds its programs by name on the PATH. So the first folder on the PATH holds scripts with these names. A script writes
its arguments to a pipe, and the process that reads the pipe forks.

Flower waits for a minute when a ClientApp is killed, and forever when its SuperExec is gone. The fork server sees this
at once. Then the program signs off and exits with the status BROKEN, and whoever has started it starts it again.

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
from typing import Any, NoReturn

import httpcore  # noqa: F401  otherwise httpx imports it in each fork

from pluribus.sites.flower.programs import BROKEN, end_with_parent, set_process_name

Work = Callable[[], Any]
SIGN_OFF = 5  # seconds
SUPERNODE, SUPEREXEC, CLIENTAPP = "flower-supernode", "flower-superexec", "flwr-clientapp"
STARTED = {
    "flower-superlink": (SUPEREXEC, "flwr-serverapp"),
    SUPERNODE: (SUPEREXEC, CLIENTAPP),
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
    fork_by_name({started: program(started) for started in STARTED[name]}, Path(folder), name == SUPERNODE)
    set_process_name(name)
    sys.argv = [name, *flags]
    status: Any = 1
    try:
        work()
    except SystemExit as end:
        status = end.code or 0
    finally:  # without this, Flower's HTTP server would keep the process alive
        _exit(status)


def program(name: str) -> Work:
    """Import the main function of one of Flower's programs."""
    (found,) = entry_points(group="console_scripts", name=name)
    work: Work = found.load()
    return work


def fork_by_name(programs: Mapping[str, Work], folder: Path, has_to_sign_off: bool = False) -> None:
    """Fork when this process or a descendant starts one of these by name. Exit if a needed process dies."""
    pipe = folder / "pipe"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    for name in programs:
        script = folder / name
        script.write_text(SCRIPT.format(name=name, pipe=shlex.quote(str(pipe))), encoding="utf-8")
        script.chmod(0o700)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    server = fork("pluribus-forks", lambda: _fork_on_demand(pipe, programs))
    signal.signal(signal.SIGCHLD, lambda *_: _exit_without(server, has_to_sign_off))


def _fork_on_demand(pipe: Path, programs: Mapping[str, Work]) -> None:
    forks: dict[int, str] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _reap(forks))
    with open(os.open(pipe, os.O_RDWR), encoding="utf-8") as lines:  # O_RDWR: without a writer the pipe would end
        for line in lines:
            sys.argv = line.removesuffix("\n").split("\t")
            name = sys.argv[0]
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # a fork is known before it can be reaped
            forks[fork(name, programs[name])] = name
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _reap(forks: dict[int, str]) -> None:
    """Forget the forks that have ended. Exit if Flower would wait for one of them."""
    while forks and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        pid, status = ended
        name = forks.pop(pid)
        if name == SUPEREXEC or (name == CLIENTAPP and os.WIFSIGNALED(status)):
            print(f"{name} has ended (status {os.waitstatus_to_exitcode(status)})", file=sys.stderr)
            _exit(BROKEN)


def fork(name: str, work: Work) -> int:
    """Start a process with this name. It ends with the process that started it. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if name == CLIENTAPP:
            _ignore_signals()
        else:
            end_with_parent()
        set_process_name(name)
        work()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:  # the code after this call belongs to the parent
        _exit(code)


def _ignore_signals() -> None:
    """Let only SIGKILL end this process.

    On SIGTERM, Flower's ClientApp says that it has failed, but sends no answer. Then a SuperNode waits forever.
    """
    if end_with_parent(signal.SIGKILL):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT})


def _exit(code: Any) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _exit_without(server: int, has_to_sign_off: bool) -> None:
    """Exit without the fork server.

    A SuperNode signs off: otherwise its key would be refused for a minute. A SuperLink cannot be ended by an exception,
    because its HTTP server catches all of them.
    """
    if not os.waitpid(server, os.WNOHANG)[0]:
        return
    if not has_to_sign_off:
        _exit(BROKEN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.alarm(SIGN_OFF)  # SIGALRM ends the process
    raise SystemExit(BROKEN)


if __name__ == "__main__":
    main(sys.argv[1:])

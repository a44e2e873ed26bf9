"""What a reader may do with input from outside: succeed, or refuse it with a PluribusError. Nothing else.

from guard import survives
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mutate import TRAP

from pluribus.errors import PluribusError

SECONDS = 60  # far more than any case takes: a case that takes longer hangs
MEMORY = 2**30  # bytes that a reader may take for a file of a few kilobytes
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")
FORBIDDEN = (
    "pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
    "socket.connect", "socket.bind", "socket.getaddrinfo", "webbrowser.open",
)  # fmt: skip


class Forbidden(BaseException):
    """A reader did what it must not do. Not an Exception, which a reader might catch."""


class _Watch:
    """What the process does while it reads. Python cannot remove an audit hook, so one stays and asks this."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # where a reader may write; None: nobody reads
        self.seen: list[str] = []

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
            self._check_path(event, args[0])
        elif event in CHANGING:
            for path in args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]:
                self._check_path(event, path)
        elif event in FORBIDDEN or (event == "import" and args[0].partition(".")[0] == TRAP):
            self._refuse(f"{event} {args!r:.200}")

    def _check_path(self, event: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor that is already open
        where = os.path.realpath(os.fsdecode(path))
        allowed = (str(self.folder), "/dev/null", "/dev/tty", "/dev/shm")
        its_own = "__pycache__" in where or "torchinductor" in where  # torch makes a folder when it loads its compiler
        if not where.startswith(allowed) and not its_own:
            self._refuse(f"{event} {where}")

    def _refuse(self, what: str) -> None:
        self.seen.append(what)
        raise Forbidden(what)


_watch = _Watch()
sys.addaudithook(_watch.hear)


def survives(read: Callable[[], Any], folder: Path) -> Any:
    """What the reader returns, or the error by which it refuses. It may write below `folder` alone."""
    with _limits(), _watched(folder):
        try:
            return read()
        except PluribusError as error:  # any other exception is a bug, and ends the test
            refusal = error
    assert str(refusal).strip(), "a refusal says what is wrong"
    assert not _asked_for_memory(refusal), "the input was refused, but only after its memory was asked for"
    return refusal


def _asked_for_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _watched(folder: Path) -> Iterator[None]:
    _watch.folder, _watch.seen = Path(os.path.realpath(folder)), []
    before, tempfile.tempdir = tempfile.tempdir, str(folder)  # temporary files are allowed, too
    try:
        yield
    finally:
        _watch.folder, tempfile.tempdir = None, before
    assert not _watch.seen, f"a reader did what it must not do: {_watch.seen}"


@contextmanager
def _limits() -> Iterator[None]:
    """No hang, and no allocation that a small file cannot need."""

    def hangs(*_: Any) -> None:
        raise Forbidden(f"the reader hangs: {SECONDS} seconds")

    before, (soft, hard) = signal.signal(signal.SIGALRM, hangs), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one case."""
    with tempfile.TemporaryDirectory(prefix="pluribus-fuzz-") as folder:
        yield Path(folder)

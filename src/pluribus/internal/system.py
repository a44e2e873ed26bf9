"""What depends on the operating system: locks, durable files, memory, forks.

Linux is tested. Windows has neither `fcntl` nor `resource`: files are locked with `msvcrt`, and memory is unknown.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any

from pluribus.errors import DeviceError

try:
    import fcntl
    import resource

    IS_POSIX = True
except ImportError:
    IS_POSIX = False

KILLED = -getattr(signal, "SIGKILL", 9)  # exit status of a process that was killed


def lock_file(file: IO[str]) -> None:
    """Lock an open file until it is closed. BlockingIOError: another process has locked it."""
    if IS_POSIX:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        _lock_first_byte(file)


def is_locked(file: IO[str]) -> bool:
    """Whether another process has locked a file."""
    try:
        if IS_POSIX:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        else:
            _lock_first_byte(file)  # for a moment: Windows has no shared locks here
    except BlockingIOError:
        return True
    return False


def _lock_first_byte(file: IO[str]) -> None:
    windows: Any = importlib.import_module("msvcrt")
    try:
        windows.locking(file.fileno(), windows.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(*error.args) from error


def wait_for_folder(handle: int) -> None:
    """Lock an open folder until it is closed. Wait while another process has locked it."""
    fcntl.flock(handle, fcntl.LOCK_EX)


def sync(path: Path) -> None:
    """Make a file's or folder's content durable."""
    if not IS_POSIX and path.is_dir():
        return  # Windows opens no folders, and keeps the names in them by itself
    handle = os.open(path, os.O_RDONLY if IS_POSIX else os.O_RDWR)  # Windows syncs only what can be written
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def peak_memory() -> int | None:
    """Peak bytes of this process, or None if the system does not report them."""
    if not IS_POSIX:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def total_memory() -> int | None:
    """Bytes of memory that this machine has, or None if the system does not report them."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_forks() -> None:
    """Refuse systems that cannot run a server or a site."""
    if not IS_POSIX:
        raise DeviceError(
            "a federation of real sites needs forks and Unix sockets, which this system does not have: use Linux."
        )

"""Ctrl-C while a command starts: it ends at once, says so in a line, and leaves no process behind.

A terminal sends it to every process of the command, so these are real ones, in a group of their own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import few_digits
from processes import start

PATIENCE = 90.0  # seconds; only a test that fails waits so long
SETTINGS = ["--data", few_digits(), "--clients", "4", "--rounds", "100000", "--device", "cpu"]
# the command line, in which worker processes pay at once
PAYING = """
import sys, torch
from pluribus.cli import main
from pluribus.engines import auto
auto.LEAST_SECONDS, auto.LEAST_SAVED = 0.0, -1e9
torch.set_num_threads(2)
sys.exit(main(sys.argv[1:]))
"""
# the command line, before anything of it is imported
FRESH = """
import os, sys
os.execv(sys.executable, [sys.executable, "-m", "pluribus", *sys.argv[1:]])
"""
WORKERS = ["run", "local", *SETTINGS, "--workers", "2"]
COMMANDS: dict[str, tuple[str | None, list[str]]] = {
    "fresh": (FRESH, WORKERS),
    "workers": (None, WORKERS),
    "auto": (PAYING, ["run", "local", *SETTINGS]),
    "jobs": (None, ["compare", "local", "fedgh", *SETTINGS, "--jobs", "2", "--seeds", "1"]),
}

Moment = Callable[[int, Path], bool]

pytestmark = pytest.mark.slow


def loaded(library: str) -> Moment:
    """When the process is the command, and has just begun to import what needs this library."""

    def is_loaded(pid: int, folder: Path) -> bool:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return words[1:3] == ["-m", "pluribus"] and library in Path(f"/proc/{pid}/maps").read_text()

    return is_loaded


def written(pattern: str, processes: int) -> Moment:
    """When the run is there, and so many processes of its group."""
    return lambda pid, folder: bool(list(folder.glob(pattern))) and len(group(pid)) >= processes


MOMENTS: dict[str, tuple[str, Moment, float]] = {
    "in the import of numpy": ("fresh", loaded("_multiarray_umath"), 0.0),
    "in the import of torch": ("fresh", loaded("libtorch_python"), 0.0),
    "as the first worker starts": ("workers", written("out/config.toml", 2), 0.0),
    "as the server of workers starts": ("workers", written("out/config.toml", 3), 0.0),
    "while that imports": ("workers", written("out/config.toml", 3), 1.0),
    "as workers start in the background": ("auto", written("out/config.toml", 2), 0.0),
    "while their server imports": ("auto", written("out/config.toml", 3), 0.5),
    "as clients move": ("auto", written("out/config.toml", 5), 0.0),
    "as the first job starts": ("jobs", written("out", 3), 0.0),
    "while jobs start": ("jobs", written("out", 3), 1.5),
}


def group(leader: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(of) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def until(done: Callable[[], bool], look: float = 0.01) -> None:
    """Look every so many seconds: in between, the command has the processor."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(look)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("case", MOMENTS)
def test_ctrl_c_while_a_command_starts(tmp_path: Path, case: str) -> None:
    command, moment, seconds = MOMENTS[case]
    program, words = COMMANDS[command]
    process = start(*words, "--out", tmp_path / "out", program=program, leads=True)
    try:
        until(lambda: process.poll() is not None or moment(process.pid, tmp_path))
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        until(lambda: process.poll() is not None, look=0.05)
        assert "Traceback" not in process.err
        assert "stopped." in process.err
        assert process.wait() == 130
        until(lambda: not group(process.pid), look=0.1)
    finally:
        if group(process.pid):
            os.killpg(process.pid, signal.SIGKILL)

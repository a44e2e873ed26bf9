"""Ctrl-C while a command starts: it ends at once, says so in a line, and leaves no process behind.

A terminal sends it to every process of the command, so these are real ones, in a group of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import pluribus
from conftest import few_digits

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
COMMANDS = {
    "workers": ["-m", "pluribus", "run", "local", *SETTINGS, "--workers", "2"],
    "auto": ["-c", PAYING, "run", "local", *SETTINGS],
    "jobs": ["-m", "pluribus", "compare", "local", "fedgh", *SETTINGS, "--jobs", "2", "--seeds", "1"],
}

Moment = Callable[[int, Path], bool]

pytestmark = pytest.mark.slow


def loaded(library: str) -> Moment:
    """When the process has just begun to import what needs this library."""
    return lambda pid, folder: library in Path(f"/proc/{pid}/maps").read_text()


def written(pattern: str, processes: int) -> Moment:
    """When the run is there, and so many processes of its group."""
    return lambda pid, folder: bool(list(folder.glob(pattern))) and len(group(pid)) >= processes


MOMENTS: dict[str, tuple[str, Moment, float]] = {
    "in the import of numpy": ("workers", loaded("_multiarray_umath"), 0.0),
    "in the import of torch": ("workers", loaded("libtorch_python"), 0.0),
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


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)  # leaves the processor to the command


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("case", MOMENTS)
def test_ctrl_c_while_a_command_starts(tmp_path: Path, case: str) -> None:
    command, moment, seconds = MOMENTS[case]
    process = subprocess.Popen(
        [sys.executable, *COMMANDS[command], "--out", str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(pluribus.__file__).parent.parent)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # who runs tests in the background ignores it
    )
    try:
        until(lambda: moment(process.pid, tmp_path))
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)[1]
        assert "Traceback" not in said
        assert "stopped." in said
        assert process.returncode == 130
        until(lambda: not group(process.pid))
    finally:
        if group(process.pid):
            os.killpg(process.pid, signal.SIGKILL)

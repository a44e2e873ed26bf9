"""Programs that are forked when somebody starts them by their names."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from pluribus.sites.flower.programs import BROKEN

PATIENCE = 60  # seconds; only a test that fails waits so long

# A process with a program `tell`, which it imports nothing for, and whose only child is the one that forks.
HOST = """
import json, os, pathlib, signal, subprocess, sys, time
from pluribus.sites.flower.forkserver import fork_by_name

def tell():
    name = pathlib.Path("/proc/self/comm").read_text().strip()
    told = {"arguments": sys.argv, "called": name, "pid": os.getpid(), "parent": os.getppid()}
    unfinished = pathlib.Path(sys.argv[1] + ".new")
    unfinished.write_text(json.dumps(told))
    unfinished.rename(sys.argv[1])
    if "wait" in sys.argv:
        time.sleep(1000)
    sys.exit(3)

fork_by_name({name: tell for name in ("tell", "flwr-clientapp", "flower-superexec")}, pathlib.Path.cwd())
for words in sys.argv[1:]:
    subprocess.run(json.loads(words), check=True)
time.sleep(1000)
"""


class Host:
    """Such a process, and what its forks tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *commands: list[str], name: str = "tell") -> subprocess.Popen[bytes]:
        """It starts `tell`, under this name, with each of these arguments."""
        words = [json.dumps([name, *command]) for command in commands]
        self.process = subprocess.Popen([sys.executable, "-c", HOST, *words], cwd=self.folder)
        return self.process

    def told(self, name: str) -> dict[str, object]:
        """What the fork with this first argument has told."""
        until(lambda: (self.folder / name).exists(), self.process)
        return dict(json.loads((self.folder / name).read_text()))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    one = Host(tmp_path)
    yield one
    if one.process is not None:
        one.process.kill()
        one.process.wait()


def until(done: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert process is None or process.poll() is None, "the process has ended"
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def alive(pid: object) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_who_starts_a_program_by_its_name_gets_a_fork(host: Host) -> None:
    host.start(["first", "--word", "two words", ""], ["second"])
    first, second = host.told("first"), host.told("second")
    assert first["arguments"] == ["tell", "first", "--word", "two words", ""]
    assert first["called"] == "tell"
    assert first["parent"] == second["parent"]
    assert first["pid"] != second["pid"]
    until(lambda: not alive(first["pid"]))  # and does not lie about as a zombie, for which Flower would wait


def test_forks_end_with_who_started_them(host: Host) -> None:
    process = host.start(["first", "wait"])
    first = host.told("first")
    process.kill()
    process.wait()
    until(lambda: not alive(first["parent"]) and not alive(first["pid"]))


def test_a_process_that_cannot_have_forks_any_more_ends(host: Host) -> None:
    """So that whoever watches it starts it again."""
    process = host.start(["first"])
    os.kill(int(str(host.told("first")["parent"])), signal.SIGKILL)
    assert process.wait(PATIENCE) == BROKEN


def test_a_process_whose_clientapp_is_killed_ends(host: Host) -> None:
    """Flower would wait for a minute. On SIGTERM the fork would exit without an answer, so it goes on."""
    process = host.start(["first", "wait"], name="flwr-clientapp")
    pid = int(str(host.told("first")["pid"]))
    os.kill(pid, signal.SIGTERM)
    blocked = re.search(r"^SigBlk:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert blocked is not None
    assert int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1
    assert process.poll() is None
    os.kill(pid, signal.SIGKILL)
    assert process.wait(PATIENCE) == BROKEN


def test_a_process_whose_clientapp_fails_goes_on(host: Host) -> None:
    """It has told Flower so itself."""
    process = host.start(["first"], ["second"], name="flwr-clientapp")
    for name in ("first", "second"):
        pid = host.told(name)["pid"]
        until(lambda pid=pid: not alive(pid))
    assert process.poll() is None


def test_a_process_whose_superexec_ends_ends(host: Host) -> None:
    """Flower would wait forever for a process that starts ClientApps."""
    assert host.start(["first"], name="flower-superexec").wait(PATIENCE) == BROKEN

"""Systems other than the one that tests run on: a Python without the modules and names of POSIX."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import Launcher, Process, start

pytestmark = pytest.mark.xdist_group("without POSIX")  # one such Python for all

# Windows' lock, by the one of POSIX that takes the same arguments. It is held by a process, not by an open file.
WITHOUT_POSIX = """
import multiprocessing.context, os, signal, sys, types
msvcrt = types.ModuleType("msvcrt")
msvcrt.LK_NBLCK = os.F_TLOCK
def locking(handle, mode, count):
    try:
        os.lockf(handle, mode, count)
    except BlockingIOError:
        raise PermissionError(13, "Permission denied")
    except OSError:  # POSIX locks no file that is open to be read, but tells whether another process has
        os.lockf(handle, os.F_TEST, count)
msvcrt.locking = locking
import torch, scipy.stats, sklearn.metrics  # these may use POSIX
sys.modules["msvcrt"] = msvcrt
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for owner, name in ((os, "fork"), (os, "sysconf"), (signal, "pthread_sigmask"), (signal, "SIGKILL")):
    delattr(owner, name)
del multiprocessing.context.ForkServerContext
import pluribus
"""
RUN = """
import sys, pluribus
result = pluribus.run("fedgh", data="digits", clients=2, rounds=1, workers=1, out=sys.argv[1])
print(result.accuracy)
"""
HELD = """
import sys, time
from pathlib import Path
from pluribus.report.numbers import in_use
from pluribus.storage.folder import RunFolder
held = RunFolder(Path(sys.argv[1]))
print("held", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
held.close()
print("then", in_use(Path(sys.argv[1])))
"""
OTHER = """
import sys
from pathlib import Path
from pluribus.errors import OtherRunError
from pluribus.report.numbers import in_use
from pluribus.storage.folder import RunFolder
print("in use", in_use(Path(sys.argv[1])))
try:
    RunFolder(Path(sys.argv[1]))
except OtherRunError:
    print("refused")
"""


@pytest.fixture(scope="module")
def without_posix() -> Iterator[Launcher]:
    """A Python without POSIX that has imported nothing of the library but its first file, and forks."""
    launcher = Launcher(WITHOUT_POSIX)
    yield launcher
    launcher.close()


def ended(program: str, *words: object, launcher: Launcher | None = None) -> Process:
    """A program in a process of its own, which has ended well."""
    process = start(*words, program=program, launcher=launcher)
    assert process.wait() == 0, process.err
    return process


def test_a_run_leaves_the_same_files(without_posix: Launcher, tmp_path: Path) -> None:
    ended(RUN, tmp_path / "without", launcher=without_posix)
    ended(RUN, tmp_path / "with")
    for name in ("partition.json", "traffic.jsonl"):
        assert (tmp_path / "without" / name).read_bytes() == (tmp_path / "with" / name).read_bytes()
    assert (tmp_path / "without" / "result.json").exists()


def test_a_folder_in_use_is_refused(without_posix: Launcher, tmp_path: Path) -> None:
    folder, enough = tmp_path / "run", tmp_path / "enough"
    folder.mkdir()
    holder = start(folder, enough, program=HELD, launcher=without_posix)
    while holder.out != "held\n":
        assert holder.poll() is None, holder.err
        time.sleep(0.01)
    other = ended(OTHER, folder, launcher=without_posix)
    assert other.out.split() == ["in", "use", "True", "refused"]
    enough.touch()
    assert holder.wait() == 0, holder.err
    assert holder.out.split() == ["held", "then", "False"]


@pytest.mark.parametrize("command", ["keys", "join"])
def test_real_sites_are_refused(without_posix: Launcher, command: str, tmp_path: Path) -> None:
    words = [tmp_path / "keys", "--server", "localhost", "--sites", "north"] if command == "keys" else []
    site = 'name = "north"\nserver = "127.0.0.1:9092"\nkeys = "keys"\nmodel = "mlp-64"\nstate = "state"\n'
    (tmp_path / "site.toml").write_text(site, encoding="utf-8")
    process = start(command, *words, launcher=without_posix, cwd=tmp_path)
    assert process.wait() == 2, process.err
    assert "Linux" in process.err
    assert "Traceback" not in process.err


def test_a_run_in_memory_and_doctor_need_no_figures_of_the_system(without_posix: Launcher) -> None:
    program = """
import pluribus
result = pluribus.run("fedgh", data="digits", clients=2, rounds=1, workers=1)
from pluribus.cli.doctor import examine
print(result.rounds, examine()["memory"])
"""
    assert ended(program, launcher=without_posix).out.split() == ["1", "None"]


def test_peak_memory_is_unknown(without_posix: Launcher) -> None:
    program = "from pluribus.study.bench import _host_memory\nprint(_host_memory())"
    assert ended(program, launcher=without_posix).out.strip() == "None"

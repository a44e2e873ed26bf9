"""Systems other than the one that tests run on: a Python without the modules and names of POSIX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
result = pluribus.run("fedgh", data="digits", clients=2, rounds=1, workers=1, out=sys.argv[1])
print(result.accuracy)
"""
HELD = """
from pathlib import Path
from pluribus.errors import OtherRunError
from pluribus.report.numbers import in_use
from pluribus.storage.folder import RunFolder
import subprocess
held = RunFolder(Path(sys.argv[1]))
other = subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]], capture_output=True, text=True)
print(other.stdout, other.stderr)
held.close()
print("then", in_use(Path(sys.argv[1])))
"""
OTHER = """
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


def run_without(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_POSIX + code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_run_leaves_the_same_files(tmp_path: Path) -> None:
    done = run_without(RUN, str(tmp_path / "without"))
    assert done.returncode == 0, done.stderr
    plain = [sys.executable, "-c", f"import sys, pluribus{RUN}", str(tmp_path / "with")]
    subprocess.run(plain, capture_output=True, check=True)
    for name in ("partition.json", "traffic.jsonl"):
        assert (tmp_path / "without" / name).read_bytes() == (tmp_path / "with" / name).read_bytes()
    assert (tmp_path / "without" / "result.json").exists()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    done = run_without(HELD, str(tmp_path), WITHOUT_POSIX + OTHER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["in", "use", "True", "refused", "then", "False"], done.stdout


@pytest.mark.parametrize("command", ["keys", "join"])
def test_real_sites_are_refused(command: str, tmp_path: Path) -> None:
    words = ["--server", "localhost", "--sites", "north"] if command == "keys" else []
    site = 'name = "north"\nserver = "127.0.0.1:9092"\nkeys = "keys"\nmodel = "mlp-64"\nstate = "state"\n'
    (tmp_path / "site.toml").write_text(site, encoding="utf-8")
    code = "import os; os.chdir(sys.argv[1])\nfrom pluribus.cli import main\nsys.exit(main(sys.argv[2:]))"
    done = run_without(code, str(tmp_path), command, *([str(tmp_path / "keys")] if words else []), *words)
    assert done.returncode == 2, done.stderr
    assert "Linux" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_in_memory_and_doctor_need_no_figures_of_the_system() -> None:
    code = """
result = pluribus.run("fedgh", data="digits", clients=2, rounds=1, workers=1)
from pluribus.cli.doctor import examine
print(result.rounds, examine()["memory"])
"""
    done = run_without(code)
    assert done.stdout.split() == ["1", "None"], done.stderr


def test_peak_memory_is_unknown() -> None:
    done = run_without("from pluribus.study.bench import _host_memory\nprint(_host_memory())")
    assert done.stdout.strip() == "None", done.stderr

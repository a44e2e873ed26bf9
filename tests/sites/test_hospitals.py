"""The example of three hospitals: its README is followed word by word, as its readers would.

The server and a site are processes as a reader has them, and the other sites are forks, to save the import of torch. A
prediction needs no process of its own, for torch is imported here already.
Its commands are those of the blocks `bash`, in their order; its blocks `text` show what they print.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forks import SOURCE, start
from network import PATIENCE, descendants
from pluribus import cli
from pluribus.sites.flower.programs import free_port
from processes import Process

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import execute  # noqa: E402

HERE = ROOT / "examples" / "hospitals"
ADDRESS = "127.0.0.1:9092"
FOLDER = "/home/you/hospitals"  # where the README has its reader work
README = (HERE / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    command
    for block in re.findall(r"^```bash\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    for command in execute.commands(block)
]
SHOWN = re.findall(r"^```text\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
LINGER = ("serve", "join")
WIDE = "300"  # columns, so that no path is cut

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.xdist_group("network")]


class Reader:
    """Someone with a copy of the example, who types what the README says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lingering: dict[str, subprocess.Popen[bytes] | Process] = {}

    def type(self, command: list[str]) -> None:
        """One command, to its end; but the server and the sites have terminals of their own."""
        if command[:2] == ["pluribus", "join"]:
            self._until(lambda: "listening on" in self.printed(typed("pluribus", "serve")[0]))
        if command[0] == "pluribus" and command[1] in LINGER:
            self._lingering[" ".join(command)] = self._start(command)
            return
        if command[:2] == ["pluribus", "predict"]:
            self.wait()
            assert self._do(command) == 0, self.printed(command)
            return
        assert self._start(command).wait(PATIENCE) == 0, self.printed(command)

    def wait(self) -> None:
        """Until the server and all sites have ended, as they should."""
        self._until(lambda: all(process.poll() is not None for process in self._lingering.values()))
        ends = {name: process.returncode for name, process in self._lingering.items()}
        assert ends == dict.fromkeys(self._lingering, 0)

    def printed(self, command: list[str]) -> str:
        """What it has printed, as if it ran where the README's reader has the example."""
        words = self._log(command).read_text(encoding="utf-8", errors="replace")
        return words.replace(str(self.folder), FOLDER)

    def close(self) -> None:
        """Kill whatever still runs."""
        for process in self._lingering.values():
            if process.poll() is None:
                for pid in [*descendants(process.pid), process.pid]:
                    os.kill(pid, 9)
                process.wait()

    def _do(self, command: list[str]) -> int:
        """In this process."""
        with self._log(command).open("w") as words, pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setenv("COLUMNS", WIDE)
            with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
                return cli.main(command[1:])

    def _start(self, command: list[str]) -> subprocess.Popen[bytes] | Process:
        program = {"pluribus": [sys.executable, "-m", "pluribus"], "python": [sys.executable], "cp": ["cp"]}[command[0]]
        log, env = self._log(command), os.environ | SOURCE | {"OMP_NUM_THREADS": "1", "COLUMNS": WIDE}
        if command in typed("pluribus", "join")[1:]:
            return start([*program, *command[1:]], log, log, env, cwd=self.folder)
        with log.open("wb") as words:
            return subprocess.Popen(
                [*program, *command[1:]],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env=env,
            )

    def _failed(self) -> list[str]:
        """What should linger but has ended otherwise than by itself."""
        return [name for name, process in self._lingering.items() if process.poll()]

    def _log(self, command: list[str]) -> Path:
        return self.folder.parent / (re.sub(r"\W+", "-", " ".join(command)) + ".log")

    def _until(self, done: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not done():
            logs = sorted(self.folder.parent.glob("*.log"))
            said = "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
            assert not self._failed(), said
            assert time.monotonic() < end, f"it did not happen\n{said}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Iterator[Reader]:
    """Who has followed the README to its end."""
    folder = tmp_path_factory.mktemp("reader") / "hospitals"
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("images", "new", "keys", "state", "federation"))
    address = f"127.0.0.1:{free_port()}"
    for file in folder.rglob("*.toml"):
        file.write_text(file.read_text(encoding="utf-8").replace(ADDRESS, address), encoding="utf-8")
    one = Reader(folder)
    try:
        for command in COMMANDS:
            one.type(command)
        one.wait()
        yield one
    finally:
        one.close()


def typed(*words: str) -> list[list[str]]:
    """The README's commands that begin so."""
    return [command for command in COMMANDS if command[: len(words)] == list(words)]


def test_the_readme_goes_all_the_way():
    sites = {"northfield", "lakeside", "harbour"}
    assert {Path(command[-1]).parent.name for command in typed("pluribus", "join")} == sites
    assert {Path(command[2]).parent.name for command in typed("pluribus", "predict")} == sites
    assert len(typed("pluribus", "serve")) == len(typed("pluribus", "keys")) == 1


def test_every_site_predicts_its_new_images(reader):
    """Chance is a sixth at best."""
    for command in typed("pluribus", "predict"):
        rows = re.findall(r"/new/(\d)-\d\.png +(\d) ", reader.printed(command))
        assert len(rows) == len(list((reader.folder / command[3]).iterdir())) >= 24
        assert sum(truth == label for truth, label in rows) / len(rows) > 0.6, command


def test_what_the_readme_shows_is_printed(reader):
    """But for numbers, and for the order in which sites come."""
    printed = {line for command in COMMANDS for line in execute.lines_of(reader.printed(command))}
    assert SHOWN
    for shown in SHOWN:
        assert set(execute.lines_of(shown)) - {"..."} <= printed

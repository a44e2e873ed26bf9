"""Programs beside this one: Flower's, and ours. They are quiet, and do not outlive who started them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pluribus.errors import PackageError, WorkerError

BIN = Path(sys.executable).parent  # Flower starts its own programs by their bare names
GRACE = 10  # seconds for a program to end when asked to
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


class Program:
    """One running program."""

    def __init__(self, command: Sequence[object], home: Path, log: Path | None) -> None:
        """`home` is where Flower keeps its things; without a log it speaks where we do."""
        self._log = log
        words = log.open("ab") if log else None
        self._begin = words.tell() if words else 0
        try:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                env=environment(home),
                start_new_session=True,  # Ctrl-C is for us, and we tell the others
                preexec_fn=end_with_parent,
            )
        finally:
            if words:
                words.close()

    def ended(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._process.poll()

    def last_words(self, most: int = 2000) -> str:
        """The end of its log, without what others before it have written there."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")[-most:] if self._log else ""

    def stop(self) -> None:
        """End it, kindly if possible."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def flower(program: str) -> Path:
    """One of Flower's programs."""
    found = BIN / program
    if not found.exists():
        raise PackageError("a federation of real sites needs Flower: pip install 'pluribus[flower]'.")
    return found


def module(name: str) -> list[str]:
    """The command that runs one of our modules."""
    return [sys.executable, "-m", name]


def environment(home: Path) -> dict[str, str]:
    """No telemetry, no update checks, no installing; these programs first."""
    return os.environ | QUIET | {"FLWR_HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}


def flwr(home: Path, *words: str | Path, seconds: float = 60) -> dict[str, Any]:
    """What Flower's command line answers to a command."""
    (answer,) = flwr_all(home, [words], seconds)
    return answer


def flwr_all(home: Path, commands: Sequence[Sequence[str | Path]], seconds: float = 60) -> list[dict[str, Any]]:
    """What Flower's command line answers, which speaks JSON, to one command after the other."""
    asked = "".join(json.dumps([*map(str, words), "--format", "json"]) + "\n" for words in commands)
    console = module("pluribus.sites.flower.commands")
    try:
        done = subprocess.run(
            console, input=asked, capture_output=True, text=True, env=environment(home), timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"flwr {commands[0][0]} did not answer within {seconds:.0f} s.") from error
    said = [json.loads(line) for line in done.stdout.splitlines()]
    if len(said) < len(commands):
        raise WorkerError(f"flwr {commands[0][0]} failed: {done.stderr.strip()[-500:]}")
    return [_understood(str(words[0]), *told) for words, told in zip(commands, said, strict=True)]


def _understood(command: str, out: str, err: str) -> dict[str, Any]:
    try:
        answer = dict(json.loads(out))
    except ValueError as error:
        raise WorkerError(f"flwr {command} failed: {(err or out).strip()[-500:]}") from error
    if not answer.get("success"):
        raise WorkerError(f"flwr {command} failed: {answer.get('error-message')}")
    return answer


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def end_with_parent() -> None:
    """However we end, even killed: the kernel ends what we started. Linux only; elsewhere a kill leaves orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def be_called(name: str) -> None:
    """What `ps` shows of this process, and Linux keeps fifteen letters of."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())

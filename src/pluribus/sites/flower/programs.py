"""Child processes: Flower's programs and ours. They end with the process that started them."""

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pluribus.errors import PackageError, WorkerError
from pluribus.internal.system import check_forks

BIN = Path(sys.executable).parent  # Flower finds its programs by name
IMPORTED = ("flwr", "httpx", "httpcore", "starlette", "uvicorn")  # by these programs
GRACE = 10  # seconds for a program to exit after SIGTERM
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONUNBUFFERED": "1",
}
BROKEN = 75  # exit status of a program of Flower that has lost a process that it needs
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


class Program:
    """One running program."""

    def __init__(self, command: Sequence[object], home: Path, log: Path | None) -> None:
        """`home` is Flower's folder. Without a log, the program writes to our stdout and stderr."""
        self._log = log
        with log.open("ab") if log else contextlib.nullcontext() as output:
            self._begin = output.tell() if output else 0
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(home),
                start_new_session=True,  # Ctrl-C reaches only us; we stop the program
                preexec_fn=end_with_parent,
            )

    def exit_status(self) -> int | None:
        """Exit status, or None while the program runs."""
        return self._process.poll()

    def last_words(self, most: int = 2000) -> str:
        """The end of the log, without the output of earlier programs."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")[-most:] if self._log else ""

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def flower(program: str) -> Path:
    """Path of one of Flower's programs."""
    check_forks()
    found = BIN / program
    if not (found.exists() and all(map(find_spec, IMPORTED))):
        raise PackageError("a federation of real sites needs Flower: pip install 'pluribus[flower]'.")
    return found


def module(name: str) -> list[str]:
    """The command that runs one of our modules."""
    return [sys.executable, "-m", name]


def environment(home: Path) -> dict[str, str]:
    """Environment without telemetry, update checks and installation. Our programs come first on the PATH."""
    return os.environ | QUIET | {"FLWR_HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}


def flwr(home: Path, *arguments: str | Path, seconds: float = 60) -> dict[str, Any]:
    """Run a command of Flower's command line, and return its answer."""
    (answer,) = flwr_all(home, [arguments], seconds)
    return answer


def flwr_all(home: Path, commands: Sequence[Sequence[str | Path]], seconds: float = 60) -> list[dict[str, Any]]:
    """Run several commands of Flower's command line, and return their answers, which are JSON."""
    lines = "".join(json.dumps([*map(str, command), "--format", "json"]) + "\n" for command in commands)
    console, env = module("pluribus.sites.flower.commands"), environment(home)
    try:
        done = subprocess.run(console, input=lines, capture_output=True, text=True, env=env, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"flwr {commands[0][0]} did not answer within {seconds:.0f} s.") from error
    outputs = [json.loads(line) for line in done.stdout.splitlines()]
    if len(outputs) < len(commands):
        raise WorkerError(f"flwr {commands[0][0]} failed: {done.stderr.strip()[-500:]}")
    return [_parse_answer(str(command[0]), *output) for command, output in zip(commands, outputs, strict=True)]


def _parse_answer(command: str, out: str, err: str) -> dict[str, Any]:
    try:
        answer = dict(json.loads(out))
    except ValueError as error:
        raise WorkerError(f"flwr {command} failed: {(err or out).strip()[-500:]}") from error
    if not answer.get("success"):
        raise WorkerError(f"flwr {command} failed: {answer.get('error-message')}")
    return answer


def free_port() -> int:
    """A port on loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> bool:
    """Let the kernel end this process with its parent, even if killed. Linux only; elsewhere a kill leaves orphans."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number) == 0)


def set_process_name(name: str) -> None:
    """Set the name that `ps` shows for this process. Linux keeps 15 characters."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())

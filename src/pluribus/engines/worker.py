"""One worker process: a host of its own, and the pipe between it and the parent, seen from both ends.

A worker keeps nothing that matters after a round is saved, so it may be killed at any time, and ends by itself as soon
as the pipe is closed: no worker outlives its parent.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pluribus.errors import PluribusError, UserCodeError, WorkerError
from pluribus.host import Host, Tensors
from pluribus.internal.arithmetic import Arithmetic
from pluribus.internal.blame import ATTRIBUTE, blame_of
from pluribus.processes import NAME, SENTENCE, UNGUARDED
from pluribus.request import Request

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BYTES = 2**30
SECONDS_TO_END = 10.0


# ---- what the parent says ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Make the host: a packed function that takes `load`."""

    host: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of a client that another worker will host."""

    client: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Host a client that another worker released."""

    client: int
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class TakeChanged:
    """Hand over the state of every client that worked since the last time."""


@dataclass(frozen=True, slots=True)
class TakeSelected:
    """Hand over what clients were measured with in the rounds that were selected since the last time."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What was saved of the client that the worker asked for."""

    tensors: Tensors | None


Command = Request | Open | Release | Adopt | TakeChanged | TakeSelected

# ---- what a worker says --------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What came of a command: its value, or the error that ended it; and how long it took."""

    value: Any
    error: BaseException | None
    seconds: float


class Wanted(NamedTuple):
    """A worker asks back: what was saved of this client?"""

    client: int


# ---- the parent's end ------------------------------------------------------------------------------------------------


class Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, context: ForkServerContext | SpawnContext, number: int, shared: list[Tensor]) -> None:
        self._number = number
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, shared, Arithmetic.here()), name=f"{NAME} {number}", daemon=True
        )
        self._process.start()
        theirs.close()  # or the pipe would stay open when the worker ends

    def send(self, what: Command | Saved) -> None:
        """Say something. Never waits for work: a worker listens while it works."""
        try:
            _send(self.connection, what)
        except OSError:
            raise self._lost() from None

    def receive(self) -> Outcome | Wanted:
        """The next thing that the worker says. Outcomes come in the order of commands."""
        try:
            return _receive(self.connection)  # type: ignore[no-any-return]
        except (EOFError, OSError):
            raise self._lost() from None

    def _lost(self) -> PluribusError:
        self._process.join(SECONDS_TO_END)
        status = self._process.exitcode
        if status == UNGUARDED:
            return UserCodeError(SENTENCE)
        who = f"worker {self._number} (process {self._process.pid})"
        if status == -signal.SIGKILL:
            return WorkerError(f"{who} was killed, perhaps because memory ran out: use fewer --workers.")
        if status is not None and status < 0:
            return WorkerError(f"{who} was ended by {signal.Signals(-status).name}.")
        return WorkerError(f"{who} ended with status {status}: what it printed says why.")

    def hang_up(self) -> None:
        """Tell the worker to end."""
        self.connection.close()

    def end(self) -> None:
        """Wait for the worker's end, or bring it about."""
        self._process.join(SECONDS_TO_END)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()


# ---- what travels ----------------------------------------------------------------------------------------------------


class _Packer(pickle.Pickler):
    """Pickles tensors as arrays, which takes half the time."""

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is made again."""
        if type(value) is not Tensor or value.requires_grad:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except TypeError:  # bfloat16, which numpy lacks
            return NotImplemented


class _SharingPacker(_Packer):
    """Leaves out what lies in shared memory."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.shared: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        """The number of a shared tensor."""
        if not (isinstance(value, Tensor) and value.is_shared()):  # type: ignore[no-untyped-call]
            return None
        numbers = [number for number, known in enumerate(self.shared) if known is value]
        if not numbers:
            self.shared.append(value)
        return numbers[0] if numbers else len(self.shared) - 1


class _SharingUnpacker(pickle.Unpickler):
    def __init__(self, file: BytesIO, shared: list[Tensor]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> Tensor:
        return self._shared[number]


def packed(value: Any) -> tuple[bytes, list[Tensor]]:
    """A value as bytes, and the shared tensors in it, which are no part of the bytes."""
    file = BytesIO()
    packer = _SharingPacker(file)
    packer.dump(value)
    return file.getvalue(), packer.shared


def _unpacked(data: bytes, shared: list[Tensor]) -> Any:
    return _SharingUnpacker(BytesIO(data), shared).load()


def _send(connection: Connection, value: Any) -> None:
    file = BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(value)
    connection.send_bytes(file.getbuffer())


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


# ---- the worker's end ------------------------------------------------------------------------------------------------


def _work(connection: Connection, shared: list[Tensor], arithmetic: Arithmetic) -> None:
    """What a worker process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all processes; the parent decides
    arithmetic.set()
    _keep_freed_memory()
    desk = _Desk(connection, shared)
    Thread(target=desk.listen, daemon=True).start()
    desk.work()


def _keep_freed_memory() -> None:
    """Hand freed tensors to the next step, not back to the system, which would clear each page anew.

    Every step frees as much as a model holds: for ResNet-18 that is 4,600 page faults, and a tenth of the time. The
    setting is the process's, so only workers take it, which are ours alone; other C libraries than glibc lack it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


class _Desk:
    """Takes commands in, lets the host do them, and hands outcomes out."""

    def __init__(self, connection: Connection, shared: list[Tensor]) -> None:
        self._connection = connection
        self._shared = shared
        self._host: Host | None = None
        self._commands = SimpleQueue[Command]()
        self._saved = SimpleQueue[Tensors | None]()

    def listen(self) -> None:
        """In a thread of its own, so that the parent's end is noticed in the middle of the work."""
        try:
            while True:
                heard: Command | Saved = _receive(self._connection)
                if isinstance(heard, Saved):
                    self._saved.put(heard.tensors)
                else:
                    self._commands.put(heard)
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # out of memory, say: nobody would ever answer
            traceback.print_exc()
            os._exit(1)

    def work(self) -> None:
        """One command after the other, until `listen` ends the process."""
        while True:
            command = self._commands.get()
            started = time.perf_counter()
            try:
                value, error = self._do(command), None
            except BaseException as failure:
                value, error = None, portable(failure)
            self._say(Outcome(value, error, time.perf_counter() - started))

    def _do(self, command: Command) -> Any:
        if isinstance(command, Open):
            self._host = self._opened(command.host)
            return None
        assert self._host is not None
        match command:
            case Release(client):
                return self._host.release(client)
            case Adopt(client, tensors):
                return self._host.adopt(client, tensors)
            case TakeChanged():
                return self._host.changed()
            case TakeSelected():
                return self._host.selected()
            case _:
                return self._host.answer(command)

    def _opened(self, host: bytes) -> Host:
        try:
            make: Callable[..., Host] = _unpacked(host, self._shared)
        except (AttributeError, ImportError) as error:
            raise UserCodeError(
                f"a worker process cannot find what this one knows ({error}). Define it in a script or a module of "
                f"its own, or leave out --workers."
            ) from error
        return make(load=self._load)

    def _load(self, k: int) -> Tensors | None:
        """The checkpoint is the parent's."""
        self._say(Wanted(k))
        return self._saved.get()

    def _say(self, what: Outcome | Wanted) -> None:
        try:
            _send(self._connection, what)
        except OSError:
            os._exit(0)


def portable(error: BaseException) -> BaseException:
    """The error, fit to be raised by the parent; one that nobody foresaw says where it came from."""
    if not isinstance(error, PluribusError):
        error.add_note("In a worker process: " + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        twin = RuntimeError(f"{type(error).__name__}: {error}")
        twin.__notes__ = getattr(error, "__notes__", [])
        setattr(twin, ATTRIBUTE, blame_of(error))
        return twin
    return error

"""One worker process with a Host, and both ends of the pipe to its parent.

After a round is saved, a worker has no state that is needed: it may be killed at any time. It ends when the pipe is
closed, so no worker outlives its parent.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from io import BytesIO
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pluribus.errors import PluribusError, UserCodeError, WorkerError
from pluribus.host import Host, Tensors
from pluribus.internal.arithmetic import Arithmetic
from pluribus.internal.blame import ATTRIBUTE, blame_of
from pluribus.internal.system import IS_POSIX, KILLED
from pluribus.processes import NAME, SENTENCE, UNGUARDED
from pluribus.request import Request

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BYTES = 2**30
SECONDS_TO_END = 10.0


@dataclass(frozen=True, slots=True)
class Open:
    """Make the host. `host` is a packed function that takes `load`."""

    host: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Remove a client that moves to another worker."""

    client: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Add a client that another worker released."""

    client: int
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class TakeChanged:
    """Return the state of every client that worked since the last call."""


@dataclass(frozen=True, slots=True)
class TakeSelected:
    """Return the measured models of the rounds that were selected since the last call."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The answer to `LoadSaved`: the saved state of the client. None: nothing was saved."""

    tensors: Tensors | None


HostCommand = Request | Release | Adopt | TakeChanged | TakeSelected
Command = Open | HostCommand


class Outcome(NamedTuple):
    """The result of a command: its value or its error, and its time."""

    value: Any
    error: BaseException | None
    seconds: float


class LoadSaved(NamedTuple):
    """Ask the parent for the saved state of a client."""

    client: int


class Start(NamedTuple):
    """How workers start. `host` is a packed function that makes their hosts, without the tensors in shared memory."""

    context: ForkServerContext | SpawnContext
    host: bytes
    shared: list[Tensor]
    arithmetic: Arithmetic


class Worker:
    """A worker process, as its parent sees it."""

    def __init__(self, number: int, how: Start) -> None:
        self._number = number
        self.connection, child_end = how.context.Pipe()
        args = child_end, how.shared, how.arithmetic
        self._process = how.context.Process(target=_run_worker, args=args, name=f"{NAME} {number}", daemon=True)
        self._process.start()
        child_end.close()  # otherwise the pipe would stay open when the worker ends

    def send(self, message: Command | Saved) -> None:
        """Send a message. This does not block on work: a worker listens while it works."""
        try:
            _send(self.connection, message)
        except OSError:
            raise self._lost_error() from None

    def receive(self) -> Outcome | LoadSaved:
        """Wait for the next message of the worker. Outcomes come in the order of commands."""
        try:
            return pickle.loads(self.connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            raise self._lost_error() from None

    def _lost_error(self) -> PluribusError:
        self._process.join(SECONDS_TO_END)
        status = self._process.exitcode
        if status == UNGUARDED:
            return UserCodeError(SENTENCE)
        who = f"worker {self._number} (process {self._process.pid})"
        if status == KILLED:
            return WorkerError(f"{who} was killed, perhaps because memory ran out: use fewer --workers.")
        if status is not None and status < 0:
            return WorkerError(f"{who} was killed by {signal.Signals(-status).name}.")
        return WorkerError(f"{who} exited with status {status}: see its output for the reason.")

    def end(self) -> None:
        """Wait until the worker ends, and kill it if it does not."""
        self._process.join(SECONDS_TO_END)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()


class _Packer(pickle.Pickler):
    """Pickles tensors as arrays, which takes half the time."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.memory_format):  # pickle would name any module that has imported torch
            return _memory_format, (str(value).removeprefix("torch."),)
        if type(value) is not Tensor or value.requires_grad:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except TypeError:  # bfloat16, which numpy lacks
            return NotImplemented


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)  # type: ignore[no-any-return]


class _SharingPacker(_Packer):
    """Leaves out tensors in shared memory, and those that will be there."""

    def __init__(self, file: BytesIO, soon: Collection[Tensor]) -> None:
        super().__init__(file)
        self._soon = {id(value) for value in soon}
        self.shared: list[Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if not (id(value) in self._soon or value.is_shared()):  # type: ignore[no-untyped-call]
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


def pack(value: Any, soon: Collection[Tensor] = ()) -> tuple[bytes, list[Tensor]]:
    """Pickle a value. Returns the bytes, and the tensors in shared memory, which the bytes do not contain.

    Tensors of `soon` are not in shared memory yet: a worker must get copies of them that are.
    """
    file = BytesIO()
    packer = _SharingPacker(file, soon)
    packer.dump(value)
    return file.getvalue(), packer.shared


def _send(connection: Connection, value: Any) -> None:
    file = BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(value)
    connection.send_bytes(file.getbuffer())


def _run_worker(connection: Connection, shared: list[Tensor], arithmetic: Arithmetic) -> None:
    """Run as a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all processes; the parent handles it
    arithmetic.set()
    _keep_freed_memory()
    loop = _CommandLoop(connection, shared)
    Thread(target=loop.listen, daemon=True).start()
    loop.work()


def _keep_freed_memory() -> None:
    """Keep freed memory for the next step: memory from the system has to be cleared page by page.

    Every step frees as much memory as a model takes. For ResNet-18 that is 4,600 page faults, a tenth of the time. The
    setting holds for the whole process, so only workers use it. Only glibc has it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if IS_POSIX else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)


class _CommandLoop:
    """Receives commands, runs them on the host, and sends outcomes."""

    def __init__(self, connection: Connection, shared: list[Tensor]) -> None:
        self._connection = connection
        self._shared = shared
        self._host: Host | None = None
        self._commands = SimpleQueue[Command]()
        self._saved = SimpleQueue[Tensors | None]()

    def listen(self) -> None:
        """Receive messages. This runs in a thread, so that a worker notices at any time that its parent has ended."""
        try:
            while True:
                message: Command | Saved = pickle.loads(self._connection.recv_bytes())
                if isinstance(message, Saved):
                    self._saved.put(message.tensors)
                else:
                    self._commands.put(message)
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:  # such as too little memory: the parent would wait forever
            traceback.print_exc()
            os._exit(1)

    def work(self) -> None:
        """Run commands one after the other, until `listen` ends the process."""
        while True:
            command = self._commands.get()
            started = time.perf_counter()
            try:
                value, error = self._do(command), None
            except BaseException as failure:
                value, error = None, make_portable(failure)
            self._reply(Outcome(value, error, time.perf_counter() - started))

    def _do(self, command: Command) -> Any:
        if isinstance(command, Open):
            self._host = self._make_host(command.host)
            return None
        assert self._host is not None
        return carry_out(self._host, command)

    def _make_host(self, host: bytes) -> Host:
        try:
            make: Callable[..., Host] = _SharingUnpacker(BytesIO(host), self._shared).load()
        except (AttributeError, ImportError) as error:
            raise UserCodeError(
                f"a worker process cannot import an object of this process ({error}). Define it in a script or a "
                f"module, or leave out --workers."
            ) from error
        return make(load=self._load)

    def _load(self, k: int) -> Tensors | None:
        """Load saved state through the parent, which has the checkpoint."""
        self._reply(LoadSaved(k))
        return self._saved.get()

    def _reply(self, message: Outcome | LoadSaved) -> None:
        try:
            _send(self._connection, message)
        except OSError:
            os._exit(0)


def carry_out(host: Host, command: HostCommand) -> Any:
    """Run a command on a host that is open."""
    match command:
        case Release(client):
            return host.release(client)
        case Adopt(client, tensors):
            return host.adopt(client, tensors)
        case TakeChanged():
            return host.take_changed()
        case TakeSelected():
            return host.take_selected()
        case _:
            return host.answer(command)


def make_portable(error: BaseException) -> BaseException:
    """Make an error that can be pickled and raised by the parent. An unexpected one gets the traceback as a note."""
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

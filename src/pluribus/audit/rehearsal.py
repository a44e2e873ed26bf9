"""One more round of a finished run, to see what clients upload: a run folder has no uploads.

The server and some clients start from the last checkpoint. They repeat the last round in which clients send anything,
by its number: its learning rate and its keys. Nothing is written to the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from pluribus import draws
from pluribus.assembly import Assembly
from pluribus.client import Client
from pluribus.errors import NoModelError
from pluribus.host import Host, make_host
from pluribus.internal.snapshot import Snapshot
from pluribus.internal.state import restore
from pluribus.internal.steps import Eager, Fit
from pluribus.message import Message, Schema, decode
from pluribus.method import PeerMethod
from pluribus.request import Reply, Request, Teach, Work
from pluribus.server_half import ServerHalf
from pluribus.storage.store import RunStore

Tensors = dict[str, Tensor]
SPENT = "state.spent"  # the table in which a private client keeps what it has spent
MOST_ROUNDS = 64  # that are looked at for one with uploads


class Watched(Eager):
    """Runs steps as they are written, and notes the fits of an exchange and what the first one starts from."""

    def __init__(self) -> None:
        self.fits: list[Fit] = []
        self.start: Tensors | None = None

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        if self.start is None:
            self.start = copies(client)
        self.fits.append(fit)
        return super().fit(client, fit)


@dataclass(frozen=True)
class Upload:
    """What one client sent in one exchange, and how it came about."""

    client: int
    stage: int
    message: Message
    start: Tensors  # of the client, before its first step
    end: Tensors  # after its last one
    fits: list[Fit]


@dataclass(frozen=True)
class Rehearsal:
    """A round that some clients worked again."""

    parts: Assembly
    host: Host
    t: int
    latest: int
    clients: list[int]
    uploads: list[Upload]
    enrolled: Mapping[int, Message]
    _blank: list[Host] = field(default_factory=list)

    def of(self, stage: int) -> list[Upload]:
        """The uploads of an exchange."""
        return [one for one in self.uploads if one.stage == stage]

    def schema(self, upload: Upload) -> Schema:
        """What the client declares to send."""
        return self.host.wires(upload.client)[upload.stage].up

    @contextmanager
    def trained(self, k: int) -> Iterator[Client]:
        """A client as the run has left it, after its own training."""
        with as_it_was(self.host.client(k), self._saved(k)), self.host.open_view(self.t, k, "after", None) as client:
            yield client

    def _saved(self, k: int) -> Tensors:
        saved = self.host.load(k)
        assert saved is not None, "only clients that took part are audited"
        return saved

    @contextmanager
    def at_upload(self, upload: Upload) -> Iterator[Client]:
        """A client as it was when it had built its message."""
        client = self.host.client(upload.client)
        client.begin(self.t, "audit", self.parts.method.schedule(self.t, self.parts.task.rounds))
        with as_it_was(client, upload.end):
            yield client

    @contextmanager
    def untrained(self, k: int) -> Iterator[Client]:
        """A client of the same architecture that has never trained."""
        if not self._blank:
            self._blank.append(make_host(self.parts, lambda k: None))
        with self._blank[0].open_view(self.t, k, "after", None) as client, client.fork():
            yield client


@contextmanager
def as_it_was(client: Client, tensors: Tensors) -> Iterator[Client]:
    """The client with other tensors, for a while."""
    with client.fork():
        restore(client.tensors(), tensors, f"client {client.card.id}")
        yield client


def copies(client: Client) -> Tensors:
    """Copies of all tensors that the client keeps."""
    return Snapshot(client.tensors()).tensors()


def rehearse(parts: Assembly, store: RunStore, most: int) -> Rehearsal:
    """Let at most so many clients of a run work for one more round."""
    latest = store.checkpoint.latest
    if latest is None:
        raise NoModelError(f"{store.path} holds no trained model: no round was saved, or its state was deleted.")
    first = max(latest - MOST_ROUNDS, parts.task.warmup - 1, -1) if _sends(parts) else latest - 1
    rounds = list(range(latest, first, -1)) or [latest]
    for t in rounds:
        found = _work(parts, store, t, latest, most)
        if found.uploads or t == rounds[-1]:
            return found
    raise AssertionError("there is a last round")


def _sends(parts: Assembly) -> bool:
    """Whether a client may send anything in a round."""
    return any(wire.up for card in parts.cards.firsts() for wire in parts.method.wires(parts.task, card))


def _work(parts: Assembly, store: RunStore, t: int, latest: int, most: int) -> Rehearsal:
    half = ServerHalf(parts.method, parts.task, parts.cards, public=parts.public_at_server)
    half.put_back(store.checkpoint.server(), store.checkpoint.enrolled())
    half.begin(t)
    clients = _choose(parts, store, t, most)
    enrolled = {k: decode(half.enrolled[k], half.wires(k)[0].once, "enrolment") for k in clients if k in half.enrolled}
    host = make_host(parts, lambda k: _with_budget(store.checkpoint.client(k)))
    uploads = []
    for stage in range(1 if isinstance(parts.method, PeerMethod) else len(parts.method.exchanges)):
        sent = [one for k in clients if (one := _ask(host, half, t, stage, k)) is not None]
        uploads += sent
        if sent and not isinstance(parts.method, PeerMethod):
            half.aggregate(stage, {one.client: one.message for one in sent})
    return Rehearsal(parts, host, t, latest, clients, uploads, enrolled)


def _with_budget(saved: Tensors | None) -> Tensors | None:
    """The state of a client as if it had spent nothing: one more round may exceed its budget. Its noise is the same."""
    return saved and {name: torch.zeros_like(value) if name == SPENT else value for name, value in saved.items()}


def _ask(host: Host, half: ServerHalf, t: int, stage: int, k: int) -> Upload | None:
    """Let a client work in an exchange. None: it sends nothing, or an empty message."""
    peer = isinstance(half.method, PeerMethod)
    request: Request = Teach(k, t) if peer else Work(k, t, stage, half.download(stage, k))
    client, watched = host.client(k), Watched()
    usual, client.runner = client.runner, watched
    before = copies(client)
    try:
        answer = host.answer(request)
    finally:
        client.runner = usual
    assert isinstance(answer, Reply)
    if not isinstance(answer.up, bytes):
        return None
    message = half.read(stage, k, answer.up)
    start = before if watched.start is None else watched.start
    return Upload(k, stage, message, start, copies(client), watched.fits) if message else None


def _choose(parts: Assembly, store: RunStore, t: int, most: int) -> list[int]:
    """Some of the clients that took part in the run, and of those that the method chooses for this round."""
    chosen = parts.method.participants(parts.task, t)
    order = list(parts.cards if chosen is None else chosen)
    draws.python_rng(parts.task.seed, "audit clients").shuffle(order)
    return sorted(islice((k for k in order if store.checkpoint.client(k) is not None), most))

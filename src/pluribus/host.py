"""The client half of the round loop, the same in one process, in workers and at real sites.

A host creates a client when a request needs it, lets it work, and keeps its state until it is saved. Only a bounded
number of clients is in memory. The others exist as saved state, or only as a key if they never took part.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from pluribus.assembly import Assembly
from pluribus.client import MOMENTA, Client, Local, Sets
from pluribus.data.federated import ClientSets
from pluribus.errors import NotFiniteError
from pluribus.evaluate import Metrics, measure_rows, rule_of, selects
from pluribus.internal.attacks import Attack, recall, remember, replay_bytes
from pluribus.internal.batches import least_rows
from pluribus.internal.blame import at
from pluribus.internal.defenses import UNDEFENDED, Defense
from pluribus.internal.guests import Guests
from pluribus.internal.metrics import METRICS
from pluribus.internal.safe_lesson import SafeLesson
from pluribus.internal.snapshot import Snapshot, copy_all
from pluribus.internal.starts import Starts
from pluribus.internal.views import SERVER_VIEWS
from pluribus.message import Inbox, Message, Schema, decode, encode
from pluribus.method import Method, PeerMethod, Wires
from pluribus.models import TwoPartModel
from pluribus.privacy.guard import RowGuard
from pluribus.privacy.messages import MessageGuard
from pluribus.request import Answer, Enrol, Evaluate, Learn, Measured, Published, Reply, Request, Spent, Teach, Work
from pluribus.storage.checkpoint import TESTED, put_back
from pluribus.task import Card, Task

Tensors = dict[str, Tensor]
Load = Callable[[int], Tensors | None]  # returns the saved tensors of a client; None: it has none
Selected = tuple[int, Tensors]  # a round, the tensors that a client was evaluated with in it, and its predictions

# Limits of clients in memory between rounds. Beyond them, a host keeps only a copy of a client's state. Beyond as many
# bytes of copies, only the checkpoint has it.
MOST_CLIENTS = 256
MOST_BYTES = 8 * 2**30
GPU_SHARE = 0.4  # of a GPU's memory
# As much memory again is for copies: of clients that left their places, and of selected models that wait to be saved.
AWAY_SHARE = 5 / 8
SELECTED_SHARE = 3 / 8
# Memory of a client that trains: a multiple of its weights (gradients, activations, recorded steps), and a constant.
TRAINING_FACTOR = 4
TRAINING_BYTES = 16 * 2**20
# A GPU records the steps of every client in memory. Of clients that need as many bytes, only a few more are in memory
# than work at once; the others take turns in their places, which costs one copy.
LARGE_BYTES = 64 * 2**20
MOST_LARGE = 24
COPYING_THREADS = 8


R = TypeVar("R")


class Limits(NamedTuple):
    """Most clients in a host's memory, most bytes of them, and most bytes of the copies of other clients."""

    clients: int
    bytes: int
    away: float

    @classmethod
    def of(cls, device: torch.device, hosts: int = 1) -> Limits:
        """The limits of one of several hosts that share a device equally."""
        most_bytes = MOST_BYTES
        if device.type == "cuda":
            most_bytes = int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
        return cls(max(1, MOST_CLIENTS // hosts), most_bytes // hosts, int(AWAY_SHARE * most_bytes) // hosts)


class Away(NamedTuple):
    """A client that left its place in memory: its card, its sets and a copy of its tensors."""

    card: Card
    sets: Sets | None  # None: it came from another host, and its sets are not yet made here
    saved: Snapshot


@dataclass(eq=False, repr=False)
class Host:
    """Hosts clients of one federation in memory."""

    method: Method
    task: Task
    cards: Mapping[int, Card]
    data: ClientSets
    local: Local
    device: torch.device
    load: Load
    same_init: bool = False
    limits: InitVar[Limits | None] = None
    attack: Attack | None = None
    defense: Defense = UNDEFENDED

    def __post_init__(self, limits: Limits | None) -> None:
        self._live: OrderedDict[int, Client] = OrderedDict()
        self._away: OrderedDict[int, Away] = OrderedDict()
        self._changed: set[int] = set()  # clients that worked since the last save
        self._saved: set[int] = set()  # clients that worked before it
        self._selected: dict[int, tuple[int, list[Snapshot]]] = {}  # rounds selected since then, with copies
        self._starts = Starts(self.task, self.same_init)
        self._footprint = cache(partial(_footprint, self.task))
        self._least: dict[str, int] = {}  # rows of a batch, by architecture
        self._limits = limits or Limits.of(self.device)
        self._headline = METRICS[self.task.metrics[0]]
        self.wires = Wires(self.method, self.task, self.cards)
        self._guests = Guests(self.task, self.local, self.device)
        terms = self.local.privacy
        self._guard = None if terms is None else RowGuard(terms) if terms.level == "row" else MessageGuard(terms)

    def answer(self, request: Request) -> Answer:
        """Answer a request about a client. An error of the method gets the round and the client as a note."""
        when = "enrolment" if isinstance(request, Enrol) else f"round {request.t}"
        with at(when, f"client {request.client}"):
            match request:
                case Enrol():
                    return self._enrol(request)
                case Work():
                    return self._work(request)
                case Teach():
                    return self._teach(request)
                case Learn():
                    return self._learn(request)
                case Evaluate():
                    return self._evaluate(request)

    def _enrol(self, request: Enrol) -> Reply:
        k = request.client
        client = self._prepared(k)
        client.begin(-1, "enrol", self.method.schedule(0, self.task.rounds))
        self._changed.add(k)
        schema, who = self.wires(k)[0].once, f"client {k} at enrolment"
        up = self._protect(client, encode(self.method.enrol(client), schema, who), schema, None, who)
        return Reply(up, None, steps=self._steps_of(client), privacy=self._spent(client))

    def _work(self, request: Work) -> Reply:
        t, k = request.t, request.client
        started = time.perf_counter()
        client, wire = self._begin(t, request.stage, k), self.wires(k)[request.stage]
        down = None
        if request.down is not None:
            down = decode(request.down, wire.down, f"round {t}, download of client {k}")
            self._receive(client, down)
        received = time.perf_counter()
        message = self.method.functions(request.stage).work(client)
        return self._reply(client, message, request, (started, received), down)

    def _teach(self, request: Teach) -> Reply:
        assert isinstance(self.method, PeerMethod)
        started = time.perf_counter()
        client = self._begin(request.t, 0, request.client)
        return self._reply(client, self.method.teach(client), request, (started, started))

    def _learn(self, request: Learn) -> Reply:
        started = time.perf_counter()
        client = self.client(request.client)
        messages: dict[int, Message] = {}
        left_out: dict[int, str] = {}
        for j, data in request.messages().items():
            try:
                messages[j] = decode(data, self.wires(j)[0].up, f"round {request.t}, client {j}")
            except NotFiniteError as error:
                left_out[j] = error.sentence
        received = time.perf_counter()
        left_out |= SafeLesson(client, partial(self._take_lesson, client, request.t))(messages)
        reply = self._reply(client, None, request, (started, received))
        return replace(reply, left_out=left_out) if left_out else reply

    def _take_lesson(self, client: Client, t: int, messages: Mapping[int, Message]) -> None:
        """Let a student learn from these messages, as if it had never learned from others in this round."""
        assert isinstance(self.method, PeerMethod)
        self._begin(t, 1, client.card.id)
        trusted = self.defense.of_messages(messages)
        if trusted:
            client.inbox = Inbox.of(trusted, self.device)
            self.method.learn(client, client.inbox)

    def _reply(
        self,
        client: Client,
        message: Message | None,
        request: Work | Teach | Learn,
        since: tuple[float, float],
        down: Message | None = None,
    ) -> Reply:
        loss = client.loss()  # waits for the GPU, so that its work is not counted as communication
        if isinstance(self._guard, MessageGuard):
            loss = None  # it would tell about private rows
        worked = time.perf_counter()
        started, received = since
        up, stage = None, request.stage if isinstance(request, Work) else 0
        left_out: dict[int, str] = {}
        schema = self.wires(client.card.id)[stage].up
        # A method without uploads sends nothing, not an empty message. Encoding refuses fields that it did not declare.
        if message is not None and (message or schema):
            try:
                up = self._encode(client, message, down, (request.t, stage))
            except NotFiniteError as error:
                if self.attack is None:
                    raise
                left_out[client.card.id] = error.sentence  # under attack, honest clients may diverge
        communication = received - started + time.perf_counter() - worked
        steps, spent = self._steps_of(client), self._spent(client)
        return Reply(up, loss, worked - received, communication, steps, left_out, spent)

    def _steps_of(self, client: Client) -> int | None:
        """The number of gradient steps. Those of whole epochs would tell how many rows a client has."""
        return client.steps if self.task.share_counts else None

    def _encode(self, client: Client, message: Message, down: Message | None, when: tuple[int, int]) -> bytes:
        """Serialize what a client sends in a round and exchange. Attackers send something else."""
        (t, stage), k = when, client.card.id
        schema, who = self.wires(k)[stage].up, f"round {t}, client {k}"
        up = self._protect(client, encode(message, schema, who), schema, down, who)
        if self.attack is None or not self.attack.lies(k):
            return up
        if self.attack.replays:
            first = recall(client.state.replayed[str(stage)])
            if first is None:
                remember(client.state.replayed[str(stage)], up)
            return first or up
        lie = self.attack.falsify(decode(up, schema, who), schema, down, k, *when)
        return encode(lie, schema, who, checked=self.attack.kind != "nan")

    def _protect(self, client: Client, up: bytes, schema: Schema, down: Message | None, who: str) -> bytes:
        """What a client sends in place of this message: with client-level privacy, one that is clipped and noised."""
        if not isinstance(self._guard, MessageGuard):
            return up
        return encode(self._guard.protect(client, decode(up, schema, who), schema, down), schema, who)

    def _evaluate(self, request: Evaluate) -> Measured:
        """Evaluate all views without a change to the client. If its validation data prefers this round to the best one
        so far, keep a copy of the model in the headline view, and of its predictions for the test rows."""
        t, k = request.t, request.client
        measured: dict[str, Metrics] = {}
        for view in self.method.views:
            with self.open_view(t, k, view, request.down, request.published) as client:
                measured[view], tested = measure_rows(rule_of(self.method, view), client)
                if view == self.method.views[0] and selects(measured[view], request.best, self._headline):
                    predictions = {f"{TESTED}{name}": value for name, value in tested.tensors().items()}
                    self._selected[k] = t, [Snapshot(client.prediction_tensors()), Snapshot(predictions)]
        return Measured(measured)

    @contextmanager
    def open_view(
        self,
        t: int,
        k: int,
        view: str,
        down: bytes | None,
        published: Mapping[str, Published] = MappingProxyType({}),
    ) -> Iterator[Client]:
        """The client as a view evaluates it. Its tensors are restored on exit."""
        if view in SERVER_VIEWS:
            with self._guests.seat(view, published[view], self._card(k), self._sets(k)) as guest:
                guest.begin(t, f"evaluation {view}", self.method.schedule(t, self.task.rounds))
                with guest.fork():
                    self.method.adapt(guest, view)
                    yield guest
            return
        client = self.client(k)
        client.begin(t, f"evaluation {view}", self.method.schedule(t, self.task.rounds))
        if view == "after":
            yield client
            return
        with client.fork():
            if down is not None:
                self._receive(client, decode(down, self.wires(k)[0].down, f"round {t}, evaluation of client {k}"))
            self.method.adapt(client, view)
            yield client

    def _prepared(self, k: int) -> Client:
        """A client that is about to work. In a private run its noise is chosen before it first does."""
        client = self.client(k)
        if self._guard is not None:
            self._guard.begin(self.method, client)
        return client

    def _spent(self, client: Client) -> Spent | None:
        """What the client has spent of its privacy budget."""
        if self._guard is None:
            return None
        return Spent(self._guard.epsilon(client), self._guard.affords_round(client))

    def _begin(self, t: int, stage: int, k: int) -> Client:
        client = self._prepared(k)
        client.begin(t, stage, self.method.schedule(t, self.task.rounds))
        self._changed.add(k)
        return client

    def _receive(self, client: Client, down: Message) -> None:
        client.take(down)
        self.method.receive(client, down)

    def rehearse(self) -> None:
        """Refuse what a private run could not bound later, with the first client of each architecture."""
        if self._guard is None:
            return
        firsts: dict[str, int] = {}
        for k in self.cards:
            firsts.setdefault(self.cards[k].model, k)
        for k in firsts.values():
            with at(f"client {k}"):
                self._guard.rehearse(self.method, self.client(k))

    def expect(self, clients: Iterable[int]) -> None:
        """Prepare clients that will soon be asked, as far as that costs no time of others."""
        new = [k for k in clients if not any(k in known for known in (self._live, self._away, self._saved))]
        self._starts.expect({k: self.cards[k].model for k in new})

    def client(self, k: int) -> Client:
        """The client in memory, created if needed. The client that was unused for longest makes room."""
        found = self.seat(k)
        assert found is not None
        return found

    def seat(self, k: int, beside: Container[int] = ()) -> Client | None:
        """The client in memory. None if there is no room without removing a client of `beside`, which works with it."""
        if k not in self._live:
            if (client := self._find_seat(k, beside)) is None:
                return None
            self._live[k] = client
        self._live.move_to_end(k)
        return self._live[k]

    def _find_seat(self, k: int, beside: Container[int]) -> Client | None:
        """Create the client if there is room. If not, reuse another client of its architecture: all tensors keep their
        addresses, so recorded steps stay valid."""
        if self._has_room(k):
            return self._create(k)
        live = list(self._live)  # at once: other threads use clients meanwhile, which changes the order
        alike = [j for j in live if self.cards[j].model == self.cards[k].model]
        leaving = [j for j in alike or live if j not in beside]
        if not leaving:
            return None if live else self._create(k)
        j = leaving[0]
        client = self._live.pop(j)
        self._away[j] = _away(client)
        self._delete_copies()
        if not alike:
            return self._find_seat(k, beside)
        self._replace(client, k)
        return client

    def _replace(self, client: Client, k: int) -> None:
        """Let a client in memory become client k, which is not in memory."""
        away = self._away.get(k)
        if away is None and type(self.method).prepare is Method.prepare and self._start_in(client, k):
            return
        if away is None or away.sets is None:
            away = _away(self._create(k))
        self._away.pop(k, None)
        assert away.sets is not None
        client.take_over(away.card, away.sets)
        away.saved.put_back(client.all_tensors())

    def _start_in(self, client: Client, k: int) -> bool:
        """Let a client in memory become client k, which has worked never or only before the last save, without creating
        another client. False: its weights have to be drawn by a constructor."""
        with at(f"client {k}"):
            saved = self.load(k)
            weights = None if saved is not None else self._starts.weights(client.card.model, k)
            if saved is None and weights is None:
                return False
            client.take_over(self._card(k), self._sets(k))
            live = client.all_tensors()
            torch._foreach_zero_(list(live.values()))
            if saved is not None:
                put_back(client.tensors(), saved, f"client {k}")
            elif weights is not None:
                copies = weights.to(self.device).views()
                copy_all({name: live[f"model.{name}"] for name in copies}, copies)
            return True

    def _has_room(self, k: int) -> bool:
        """Whether one more client fits, by the size of its weights and what training usually adds."""
        live = list(self._live)
        if not live:
            return True
        if len(live) >= self._limits.clients:
            return False
        sizes, own = [self._footprint(self.cards[j].model) for j in live], self._footprint(self.cards[k].model)
        large = sum(size > LARGE_BYTES for size in sizes)
        if self.device.type == "cuda" and own > LARGE_BYTES and large >= MOST_LARGE:
            return False
        return sum(sizes) + own <= self._limits.bytes

    def _create(self, k: int) -> Client:
        with at(f"client {k}"):
            card = self._card(k)
            sets, public, exams = self._sets(k)
            model = self._starts.model(card.model, k, self.device)
            client = Client(card, self.task, model, sets, self.local, self.device, public=public, exams=exams)
            self.method.prepare(client)
            if self.attack is not None and self.attack.replays:  # all clients: they take each other's places in memory
                client.state.replayed = self._allocate_replay(k)
            if self._guard is not None:
                self._guard.attach(client)
            client.state.fix()
            down = {name: field for wire in self.wires(k) for name, field in wire.down.items()}
            client.equip(self.method.optimizers(client), down, self._least_rows(client))
            if self.device.type == "cuda":
                client.pack()
            if (away := self._away.pop(k, None)) is not None:
                away.saved.put_back(client.all_tensors())
            elif (saved := self.load(k)) is not None:
                put_back(client.tensors(), saved, f"client {k}")
            return client

    def _allocate_replay(self, k: int) -> Tensors:
        """Space for the first message of each exchange. Its size depends on the architecture alone."""
        sizes = {"batch": self.local.batch}
        most = {str(at): replay_bytes(one.up, self.task.classes, sizes) for at, one in enumerate(self.wires(k))}
        return {name: torch.zeros(size, dtype=torch.uint8) for name, size in most.items()}

    def _sets(self, k: int) -> Sets:
        return Sets(self.data.sets(k), self.data.public_for(k), self.data.exams_for(k))

    def _least_rows(self, client: Client) -> int:
        """Smallest batch for the client's model and for the models that the method attached."""
        if client.card.model not in self._least:
            models = [client.model, *(one for one in client.state.modules() if isinstance(one, TwoPartModel))]
            self._least[client.card.model] = max(least_rows(model, self.task.input) for model in models)
        return self._least[client.card.model]

    def _card(self, k: int) -> Card:
        # The message of enrolment is for the server: here it would depend on when the client was created.
        return replace(self.cards[k], enrolled=None)

    def _delete_copies(self) -> None:
        """Delete the oldest copies of saved clients while all copies together exceed the limit."""
        taken = sum(away.saved.nbytes for away in self._away.values())
        for k in [k for k in self._away if k not in self._changed]:
            if taken <= self._limits.away:
                return
            taken -= self._away.pop(k).saved.nbytes

    def take_changed(self) -> dict[int, Tensors]:
        """The state of each client that worked since the last call, as CPU copies. Call it between rounds."""
        states = self._copy_each(sorted(self._changed), self._state)
        self._saved |= self._changed
        self._changed = set()
        self._delete_copies()
        return states

    def _state(self, k: int) -> Tensors:
        if k in self._live:
            return Snapshot(self._live[k].tensors()).tensors()
        return {n: value for n, value in self._away[k].saved.tensors().items() if not n.startswith(MOMENTA)}

    def take_selected(self) -> dict[int, Selected]:
        """The clients whose validation data selected another round since the last call: that round, and CPU copies of
        the tensors that were evaluated and of the predictions."""
        selected, self._selected = self._selected, {}

        def copies(k: int) -> Selected:
            t, saved = selected[k]
            return t, {name: value for one in saved for name, value in one.tensors().items()}

        return self._copy_each(sorted(selected), copies)

    def _copy_each(self, clients: Iterable[int], copy: Callable[[int], R]) -> dict[int, R]:
        """Copy something of each client to the CPU. A GPU feeds several threads, which each fill new memory."""
        if self.device.type != "cuda":
            return {k: copy(k) for k in clients}
        clients = list(clients)
        with ThreadPoolExecutor(COPYING_THREADS, "copies") as threads:
            return dict(zip(clients, threads.map(copy, clients), strict=True))

    def release(self, k: int) -> Tensors | None:
        """Remove a client that moves to another host. Returns all of its tensors, or None if they are saved."""
        client, away = self._live.pop(k, None), self._away.pop(k, None)
        if k not in self._changed:
            return None
        self._changed.remove(k)
        left = away if client is None else _away(client)
        assert left is not None
        return left.saved.tensors()

    def adopt(self, k: int, tensors: Tensors) -> None:
        """Take a client that another host released."""
        self._away[k] = Away(self._card(k), None, Snapshot(tensors))
        self._changed.add(k)

    def pending(self) -> int:
        return len(self._changed)  # clients with unsaved state

    def is_full(self) -> bool:
        """Whether copies that cannot be deleted before they are saved take more memory than all copies may."""
        return sum(away.saved.nbytes for k, away in self._away.items() if k in self._changed) > self._limits.away

    def close(self) -> None:
        self._starts.close()


def _footprint(task: Task, model: str) -> int:
    return TRAINING_FACTOR * task.nbytes(model) + TRAINING_BYTES


def _away(client: Client) -> Away:
    return Away(client.card, client.sets(), Snapshot(client.all_tensors()))


def most_selected(device: torch.device) -> int:
    """Most bytes of selected models that may wait in memory to be saved."""
    return int(SELECTED_SHARE * Limits.of(device).bytes)


def make_host(parts: Assembly, load: Load, limits: Limits | None = None) -> Host:
    """A host for all clients of a simulated federation."""
    return host_factory(parts, limits)(load)


def host_factory(parts: Assembly, limits: Limits | None = None) -> Callable[[Load], Host]:
    """A function that makes such a host, in this process or in another one."""
    where, one = (parts.data, parts.local, parts.device), parts.experiment
    return partial(
        Host,
        parts.method,
        parts.task,
        parts.cards,
        *where,
        same_init=one.same_init,
        limits=limits,
        attack=one.lies(),
        defense=one.guard(),
    )

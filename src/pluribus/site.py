"""Where clients live: the client half of the round loop, the same in one process, in workers and at real sites.

A site brings a client to life when it is asked for, lets it work, and keeps its state until it is saved. Only a bounded
number of clients is in memory; the others are their saved state, or just their key if they never took part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pluribus.checkpoint import put_back
from pluribus.client import Client, Local
from pluribus.data.federated import Federated
from pluribus.evaluate import Figures, figures
from pluribus.message import Inbox, Message, Wire, decode, encode
from pluribus.method import Method, PeerMethod
from pluribus.state import restore
from pluribus.task import Cards, Task

Tensors = dict[str, Tensor]

# What may stay in memory between rounds; a client beyond it is its saved state.
MOST_CLIENTS = 256
MOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Reply:
    """What a client answers: its encoded message (None: nothing to send), and its mean training loss."""

    up: bytes | None
    loss: float | None


class Site:
    """Hosts clients of one federation."""

    def __init__(
        self,
        method: Method,
        task: Task,
        cards: Cards,
        data: Federated,
        local: Local,
        device: torch.device,
        load: Callable[[int], Tensors | None],
        same_init: bool = False,
    ) -> None:
        self.method = method
        self.task = task
        self.cards = cards
        self.data = data
        self.local = local
        self.device = device
        self._load = load
        self._same_init = same_init
        self._live: OrderedDict[int, Client] = OrderedDict()
        self._bytes: dict[int, int] = {}
        self._changed: dict[int, Tensors | None] = {}  # None: still live, state is read when it is asked for
        self._momenta: dict[int, Tensors] = {}  # of clients that left memory and may be asked again in this round
        self._wires: dict[str, tuple[Wire, ...]] = {}

    # ---- work ------------------------------------------------------------------------------------------------------

    def enrol(self, k: int) -> bytes:
        """The client's one message at joining."""
        client = self.client(k)
        client.begin(-1, "enrol", self.method.schedule(0, self.task.rounds))
        self._changed[k] = None
        return encode(self.method.enrol(client), self.wires(k)[0].once, f"client {k} at enrolment")

    def work(self, t: int, stage: int, k: int, down: bytes | None) -> Reply:
        """One exchange: receive, work, answer."""
        client, wire = self._start(t, stage, k), self.wires(k)[stage]
        exchange = self.method.exchanges[stage]
        if down is not None:
            self._receive(client, decode(down, wire.down, f"round {t}, download of client {k}"))
        message = getattr(self.method, exchange.work)(client)
        return Reply(self._encode(message, wire, t, k), client.loss())

    def teach(self, t: int, k: int) -> Reply:
        """First barrier of a peer method."""
        assert isinstance(self.method, PeerMethod)
        client = self._start(t, 0, k)
        return Reply(self._encode(self.method.teach(client), self.wires(k)[0], t, k), client.loss())

    def learn(self, t: int, k: int, inbox: Mapping[int, bytes]) -> Reply:
        """Second barrier of a peer method."""
        assert isinstance(self.method, PeerMethod)
        client = self._start(t, 1, k)
        messages = {j: decode(data, self.wires(j)[0].up, f"round {t}, client {j}") for j, data in inbox.items()}
        client.inbox = Inbox.of(messages, self.device)
        self.method.learn(client, client.inbox)
        return Reply(None, client.loss())

    def evaluate(self, t: int, k: int, down: bytes | None) -> dict[str, Figures]:
        """Figures of every view. Leaves no trace in the client."""
        client = self.client(k)
        measured: dict[str, Figures] = {}
        for view in self.method.views:
            client.begin(t, f"evaluation {view}", self.method.schedule(t, self.task.rounds))
            if view == "after":
                measured[view] = figures(self.method, client)
                continue
            with client.fork():
                if down is not None:
                    self._receive(client, decode(down, self.wires(k)[0].down, f"round {t}, evaluation of client {k}"))
                self.method.adapt(client, view)
                measured[view] = figures(self.method, client)
        return measured

    def _start(self, t: int, stage: int, k: int) -> Client:
        client = self.client(k)
        client.begin(t, stage, self.method.schedule(t, self.task.rounds))
        self._changed[k] = None
        return client

    def _receive(self, client: Client, down: Message) -> None:
        client.take(down)
        self.method.receive(client, down)

    def _encode(self, message: Message | None, wire: Wire, t: int, k: int) -> bytes | None:
        # A method without an upload sends nothing at all, not an empty message; what it did not declare is refused.
        if message is None or not (message or wire.up):
            return None
        return encode(message, wire.up, f"round {t}, client {k}")

    def wires(self, k: int) -> tuple[Wire, ...]:
        """What may travel to and from a client."""
        card = self.cards[k]
        if card.model not in self._wires:
            self._wires[card.model] = self.method.wires(self.task, card)
        return self._wires[card.model]

    # ---- clients in memory -----------------------------------------------------------------------------------------

    def client(self, k: int) -> Client:
        """The client, brought to life if need be; the one unused for longest makes room."""
        if k not in self._live:
            client = self._bring_to_life(k)
            self._bytes[k] = sum(value.nbytes for value in client.tensors().values())
            self._live[k] = client
            while len(self._live) > MOST_CLIENTS or (len(self._live) > 1 and sum(self._bytes.values()) > MOST_BYTES):
                self._retire(next(iter(self._live)))
        self._live.move_to_end(k)
        return self._live[k]

    def _bring_to_life(self, k: int) -> Client:
        # What a client sent when it enrolled is for the server: here it would depend on when the client came to life.
        card = replace(self.cards[k], enrolled=None)
        model = self.task.build(card.model, "client", *((card.model,) if self._same_init else (k,)))
        client = Client(card, self.task, model, self.data.sets(k), self.local, self.device)
        self.method.prepare(client)
        client.state.fix()
        down = {name: field for wire in self.wires(k) for name, field in wire.down.items()}
        client.equip(self.method.optimisers(client), down)
        saved = self._changed.get(k) or self._load(k)
        if saved is not None:
            put_back(client.tensors(), saved, f"client {k}")
        if k in self._momenta:
            restore(_momenta(client), self._momenta.pop(k), f"client {k}")
        if k in self._changed:
            self._changed[k] = None
        return client

    def _retire(self, k: int) -> None:
        client = self._live.pop(k)
        del self._bytes[k]
        if k in self._changed:
            self._changed[k] = _copies(client.tensors())
            if len(self.method.exchanges) > 1:
                self._momenta[k] = _copies(_momenta(client))

    def changed(self) -> dict[int, Tensors]:
        """State of every client that worked since the last call, as copies on the CPU. For use between rounds."""
        states = {k: _copies(self._live[k].tensors()) if saved is None else saved for k, saved in self._changed.items()}
        self._changed, self._momenta = {}, {}
        return dict(sorted(states.items()))

    def pending(self) -> int:
        """How many clients wait to be saved."""
        return len(self._changed)


def _momenta(client: Client) -> Tensors:
    """What outlives an exchange, but not the round."""
    round_long = {key: optimiser for key, optimiser in client.optimisers.items() if optimiser.life == "round"}
    return {f"{key}.{name}": slot for key, one in round_long.items() for name, slot in one.slots().items()}


def _copies(tensors: Tensors) -> Tensors:
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}

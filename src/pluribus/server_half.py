"""The server half of the round loop, the same in a simulation, in a prediction and on a real server.

`Server` is what a method sees. `ServerHalf` calls the method.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from torch import Tensor

from pluribus.errors import NotFiniteError
from pluribus.internal.blame import at
from pluribus.internal.defenses import UNDEFENDED, Defense
from pluribus.internal.safe_merge import Merge, SafeMerge, sizes_in, sizes_of
from pluribus.internal.steps import ServerRunner
from pluribus.internal.views import SERVER_VIEWS
from pluribus.message import LARGEST, Message, decode, encode, schema_of
from pluribus.method import Method, Wires
from pluribus.privacy.central import NoisedMean
from pluribus.request import Published
from pluribus.server import PublicRows, Server
from pluribus.storage.checkpoint import put_back
from pluribus.task import Cards, Task


def publish(
    method: Method, server: Server, client: int, known: dict[tuple[str, str], Published]
) -> dict[str, Published]:
    """The models of the server that a client's rows evaluate, by view. `known` keeps those that were encoded before."""
    found: dict[str, Published] = {}
    for view in (view for view in method.views if view in SERVER_VIEWS):
        with at("server", f"view {view}"):
            model, tensors = method.server_model(server, view, client)
        if (view, model) not in known:
            schema, who = schema_of(server.task.shape_of(model), view), f"round {server.t}, view {view}"
            message = Message({f"{view}.{name}": value for name, value in tensors.items()})
            known[view, model] = Published(model, encode(message, schema, who))
        found[view] = known[view, model]
    return found


class ServerHalf:
    """Hosts the server of one federation. By default it computes on the CPU, as its method is written."""

    def __init__(
        self,
        method: Method,
        task: Task,
        cards: Cards,
        runner: ServerRunner | None = None,
        defense: Defense = UNDEFENDED,
        public: PublicRows | None = None,
    ) -> None:
        self.method, self.task, self.cards = method, task, cards
        self.wires = Wires(method, task, cards)
        self.server = Server(task, cards, runner, defense, public)
        self.noised: NoisedMean | None = None  # of a private run with a trusted server
        self.enrolled: dict[int, bytes] = {}
        cards.enrolled.clear()  # clients that enrolled after the last checkpoint do so again
        with at("server"):
            method.setup(self.server)
        self.server.state.fix()

    def put_back(self, saved: dict[str, Tensor], enrolled: Mapping[int, bytes]) -> None:
        """Restore the saved state of the server and the messages of enrolment."""
        put_back(self.state(), saved, "the server")
        for k, data in enrolled.items():
            self.enrol(k, data)

    def state(self) -> dict[str, Tensor]:
        """The live tensors that the server keeps between rounds, by name."""
        return self.server.state.state_dict()

    def can_go_on(self, t: int) -> bool:
        """Whether the state of round t can be sent to clients, in every exchange. Saved states of older versions may be
        infinite, or hold numbers that no client can compute with."""
        if all(size <= LARGEST for size in sizes_of(self.state()).values()):
            return True
        self.begin(t)
        try:
            return all(
                size <= LARGEST
                for stage in range(len(self.method.exchanges))
                for k in self.cards
                for size in self._sizes_sent(stage, k)
            )
        except (ArithmeticError, RuntimeError, ValueError, NotFiniteError):  # as in a merge
            return False

    def _sizes_sent(self, stage: int, k: int) -> Collection[float]:
        """The largest magnitude in each field of the message to a client."""
        data = self.download(stage, k)
        if data is None:
            return ()
        return sizes_in(decode(data, self.wires(k)[stage].down, f"download of client {k}")).values()

    def begin(self, t: int) -> None:
        self.server.begin(t, self.method.schedule(t, self.task.rounds))

    def enrol(self, k: int, data: bytes) -> None:
        """Read a client's message of enrolment and put it on its card."""
        self.enrolled[k] = data
        self.cards.enrolled[k] = decode(data, self.wires(k)[0].once, f"enrolment of client {k}")

    def download(self, stage: int, k: int) -> bytes | None:
        """The encoded message to a client in this exchange. None: there is none."""
        download = self.method.functions(stage).down
        if download is None:
            return None
        schema = self.wires(k)[stage].down
        with at("server", f"download for client {k}"):
            message = download(self.server, k)
        if message is None or not (message or schema):
            return None
        return encode(message, schema, f"round {self.server.t}, download of client {k}")

    def read(self, stage: int, k: int, up: bytes) -> Message:
        """Decode a client's upload of this exchange."""
        return decode(up, self.wires(k)[stage].up, f"round {self.server.t}, client {k}")

    def aggregate(self, stage: int, uploads: Mapping[int, Message]) -> dict[int, str]:
        """Pass the uploads of an exchange to the method. There is at least one.

        Returns the clients whose upload had to be left out, with the reason: it would have spoiled the server.
        """
        merge = self.method.functions(stage).merge
        if merge is None:
            return {}
        after = (stage + 1) % len(self.method.exchanges)
        defended = merge if self.method.defends_itself else partial(self._merge_defended, merge, stage)
        return SafeMerge(self.server, defended, lambda clients: self.try_downloads(after, clients))(uploads)

    def _merge_defended(self, merge: Merge, stage: int, server: Server, uploads: Mapping[int, Message]) -> None:
        """Merge uploads as the defense lets them through. Clipping bounds the distance to what the server sent."""
        if self.noised is not None:
            schemas = {k: self.wires(k)[stage].up for k in uploads}
            merge(server, self.noised.of_messages(uploads, schemas, server.t, stage))
            return
        down = self.method.functions(stage).down
        about: dict[int, dict[str, Tensor]] = {}
        if server.defense.name == "clip" and down is not None:
            sent = {k: message for k in uploads if (message := down(server, k)) is not None}
            about = {k: {n: value.cpu() for n, value in one.part().items()} for k, one in sent.items()}  # as uploads
        merge(server, server.defense.of_messages(uploads, about))

    def try_downloads(self, stage: int, clients: Iterable[int]) -> None:
        """Raise the error that a message to one of these clients would meet."""
        for k in clients:
            self.download(stage, k)

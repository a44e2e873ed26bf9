"""A federation without the loop: its parts can be worked in any order, and what travels can be changed on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pluribus import draws
from pluribus.assembly import Assembly
from pluribus.conformance.bits import bits
from pluribus.conformance.steps import everything, unchanged
from pluribus.data.federated import Data
from pluribus.host import make_host
from pluribus.internal.blame import at
from pluribus.internal.steps import Runner
from pluribus.message import Message, Parcel, Rows, Value, decode, encode
from pluribus.method import PeerMethod
from pluribus.request import Enrol, Evaluate, Learn, Measured, Reply, Request, Teach, Work
from pluribus.server import Server
from pluribus.server_half import publish


class Read(Message):
    """A message that notes which of its fields are looked at."""

    def __init__(self, message: Message, where: Any, read: set[tuple[Any, str]]) -> None:
        super().__init__(message)
        self._where, self._read = where, read

    def __getitem__(self, name: str) -> Value:
        self._read.add((self._where, name))
        return super().__getitem__(name)

    def tensor(self, name: str) -> Tensor:
        self._read.add((self._where, name))
        return super().tensor(name)

    def rows(self, name: str) -> Rows:
        self._read.add((self._where, name))
        return super().rows(name)

    def part(self, prefix: str = "") -> dict[str, Tensor]:
        found = super().part(prefix)
        seen = {id(value) for value in found.values()}
        self._read.update((self._where, name) for name, value in self._fields.items() if id(value) in seen)
        return found


def with_other(message: Message, name: str) -> Message:
    """The same message with other numbers in one field, wherever it has any."""
    value = message[name]
    other = Rows(_other(value.value), value.held) if isinstance(value, Rows) else _other(value)
    return Message({**message, name: other})


def _other(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return ~value
    if not value.is_floating_point():
        return value + (1 + torch.arange(value.numel()) % 3).to(value.dtype).reshape(value.shape)
    noise = torch.randn(value.shape, generator=draws.generator("other numbers"))
    return value + ((0.5 + value.abs()) * noise).to(value.dtype)


class Sent(NamedTuple):
    """One message that traveled."""

    round: int
    exchange: int
    client: int
    direction: str
    data: bytes


class ByHand:
    """The parts of a federation without the loop, to be worked in any order.

    In a `listening` round each field of what comes down is tried with other numbers, on clients that are put back.
    `sent` has all that traveled, by exchange, direction and field; `heeded` what made a difference to a client, or was
    looked at by the server. `messages` has all messages.
    """

    def __init__(self, parts: Assembly, listening: int | None = None, runner: Runner | None = None) -> None:
        self.parts, self.method = parts, parts.method
        self.host = make_host(parts, lambda k: None)
        self.server = Server(parts.task, parts.cards, public=parts.public_at_server)
        with at("server"):
            self.method.setup(self.server)
        self._listening = listening
        self.sent: set[tuple[Any, str]] = set()
        self.heeded: set[tuple[Any, str]] = set()
        self.messages: list[Sent] = []
        self.is_unstable = False
        """Whether the same message left a client different when it came again: no field can be tried then."""
        if runner is not None:
            for k in parts.cards:
                self.host.client(k).runner = runner

    def ignored(self, direction: str) -> list[str]:
        """Fields that traveled this way and that nobody heeded."""
        return sorted(name for (way, _), name in self.sent - self.heeded if way == direction)

    def round(self, t: int, order: Iterable[int]) -> dict[tuple[int, int], bytes | None]:
        """One round; who answered what in which exchange."""
        order = list(order)
        self.server.begin(t, self.method.schedule(t, self.parts.task.rounds))
        if self.method.enrols:
            for k in [k for k in order if k not in self.parts.cards.enrolled]:
                up = self._answer(Enrol(k))
                assert up is not None, "encode returns bytes"
                self.messages.append(Sent(t, 0, k, "up", up))
                message = decode(up, self.host.wires(k)[0].once, f"enrolment of client {k}")
                self.parts.cards.enrolled[k] = self._watched(message, "enrol")
        return self._peers(self.method, t, order) if isinstance(self.method, PeerMethod) else self._server(t, order)

    def _answer(self, request: Request) -> bytes | None:
        answer = self.host.answer(request)
        assert isinstance(answer, Reply)
        assert not isinstance(answer.up, Parcel), "a host in this process sends bytes"
        return answer.up

    def _server(self, t: int, order: list[int]) -> dict[tuple[int, int], bytes | None]:
        answers: dict[tuple[int, int], bytes | None] = {}
        for stage in range(len(self.method.exchanges)):
            uploads = {}
            for k in order:
                down, wire = self.download(stage, k), self.host.wires(k)[stage]
                if down is not None:
                    self.messages.append(Sent(t, stage, k, "down", down))
                if down is not None and t == self._listening:
                    self._listen(t, stage, k, decode(down, wire.down, "download"))
                up = answers[stage, k] = self._answer(Work(k, t, stage, down))
                if up is not None:
                    self.messages.append(Sent(t, stage, k, "up", up))
                    uploads[k] = self._watched(decode(up, wire.up, "upload"), stage)
            if uploads and (merge := self.method.functions(stage).merge) is not None:
                with at("server"):
                    merge(self.server, dict(sorted(uploads.items())))
        return answers

    def _peers(self, method: PeerMethod, t: int, order: list[int]) -> dict[tuple[int, int], bytes | None]:
        sent = {k: self._answer(Teach(k, t)) for k in order}
        self.messages += [Sent(t, 0, k, "up", data) for k, data in sent.items() if data is not None]
        teachers = method.topology(self.parts.task, t, tuple(sorted(order)))
        for k in order:
            inbox = {j: data for j in teachers.get(k, ()) if (data := sent[j]) is not None}
            self.messages += [Sent(t, 1, k, "down", data) for data in inbox.values()]
            if inbox and t == self._listening:
                self._listen_to_peers(t, k, inbox)
            if inbox:
                self._answer(Learn(k, t, inbox))
        return {(0, k): data for k, data in sent.items()}

    def download(self, stage: int, k: int) -> bytes | None:
        download = self.method.functions(stage).down
        if download is None:
            return None
        schema = self.host.wires(k)[stage].down
        with at("server", f"download for client {k}"):
            message = download(self.server, k)
        return None if message is None or not (message or schema) else encode(message, schema, "download")

    def evaluate(self, t: int, k: int) -> Measured:
        """Evaluate every view of a client."""
        published = publish(self.method, self.server, k, {})
        answer = self.host.answer(Evaluate(k, t, self.download(0, k), published=published))
        assert isinstance(answer, Measured)
        return answer

    def _watched(self, upload: Message, stage: int | str) -> Message:
        self.sent.update((("up", stage), name) for name in upload)
        return Read(upload, ("up", stage), self.heeded)

    def _listen(self, t: int, stage: int, k: int, down: Message) -> None:
        schema = self.host.wires(k)[stage].down

        def work(message: Message) -> Any:
            return self._answer(Work(k, t, stage, encode(message, schema, "download")))

        self._try_others(("down", stage), k, list(down), lambda name: work(with_other(down, name) if name else down))

    def _listen_to_peers(self, t: int, k: int, inbox: Mapping[int, bytes]) -> None:
        schemas = {j: self.host.wires(j)[0].up for j in inbox}
        messages = {j: decode(data, schemas[j], "peer") for j, data in inbox.items()}

        def learn(name: str | None) -> Any:
            heard = {j: with_other(m, name) if name else m for j, m in messages.items()}
            return self._answer(Learn(k, t, {j: encode(m, schemas[j], "peer") for j, m in heard.items()}))

        self._try_others(("down", 0), k, list(messages[min(messages)]), learn)

    def _try_others(self, where: Any, k: int, names: list[str], work: Callable[[str | None], Any]) -> None:
        """Which fields make a difference to what a client becomes, answers and predicts. `work(None)` changes none."""
        self.sent.update((where, name) for name in names)
        new = [name for name in names if (where, name) not in self.heeded]
        if not new:
            return
        usual, again = (self._outcome(k, lambda: work(None)) for _ in range(2))
        if usual != again:
            self.is_unstable = True
        self.heeded.update((where, name) for name in new if self._outcome(k, partial(work, name)) != usual)

    def _outcome(self, k: int, work: Callable[[], Any]) -> Any:
        client = self.host.client(k)
        with unchanged(client):
            try:
                answer = work()
                scores = client.sweep(self.method.predict)
            except Exception as error:  # numbers that it cannot work with have been looked at
                return repr(error)
            # what came down lies in `got` without anyone's doing
            became = {name: value for name, value in everything(client).items() if not name.startswith("got.")}
            return answer, {name: bits(value) for name, value in (became | {"scores": scores}).items()}

    def classes_predicted(self, t: int) -> int:
        """How many classes a client finds among all images: the most over clients and views.

        After two rounds a global model may know hardly two; over all views there is room to a false alarm.
        """
        return max(self._classes(t, k, view) for k in self.parts.cards for view in self.method.views)

    def _classes(self, t: int, k: int, view: str) -> int:
        published = publish(self.method, self.server, k, {})
        with self.host.open_view(t, k, view, self.download(0, k), published) as client:
            whole = Data(client.data["train"].store, torch.arange(len(self.parts.dataset.y)))
            return len(client.sweep(self.method.predict, whole).argmax(1).unique())  # type: ignore[no-untyped-call]

    def tensors(self) -> dict[str, Tensor]:
        found = {f"server {name}": value.clone() for name, value in self.server.state.state_dict().items()}
        for k in self.parts.cards:
            found |= {f"client {k} {name}": value.clone() for name, value in self.host.client(k).tensors().items()}
        return found

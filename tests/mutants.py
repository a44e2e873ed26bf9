"""Methods, models and data with one fault each, which `pluribus check` must find. The methods break a shared head."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus import Batch, Card, Client, Dataset, Field, Message, Server, Task, Wire
from pluribus.message import Value
from pluribus.method import Sizes, Traffic
from toys import SharedHead


def changed(message: Message, factor: float) -> dict[str, Value]:
    """The same fields with other numbers."""
    return {name: value * factor for name, value in message.part().items()}


@dataclass(frozen=True)
class Undeclared(SharedHead):
    """Sends a field that the schema does not have."""

    def local_update(self, client: Client) -> Message:
        return Message({**super().local_update(client), "secret": torch.ones(1)})


@dataclass(frozen=True)
class Unequal(SharedHead):
    """Clients of one model have different schemas."""

    def schema(self, task: Task, card: Card) -> Wire:
        wire = super().schema(task, card)
        return Wire(down=wire.down, up={**wire.up, "rows": Field((card.samples,))})


@dataclass(frozen=True)
class Counting(SharedHead):
    """Counts in `download`, and sends less each time."""

    def setup(self, server: Server) -> None:
        super().setup(server)
        server.state.sent = torch.zeros(())

    def download(self, server: Server, client: int) -> Message:
        server.state.sent += 1
        return Message(changed(super().download(server, client), 1 / float(server.state.sent)))


@dataclass(frozen=True)
class Forgetful(SharedHead):
    """Keeps a number of the server outside of `server.state`."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        server.merged = getattr(server, "merged", 0) + 1
        super().aggregate(server, {k: Message(changed(m, 1 / server.merged)) for k, m in uploads.items()})


@dataclass(frozen=True)
class Attached(SharedHead):
    """Keeps a number of a client outside of `client.state`."""

    def local_update(self, client: Client) -> Message:
        client.updates = getattr(client, "updates", 0) + 1
        return Message(changed(super().local_update(client), 1 / client.updates))


@dataclass(frozen=True)
class Brightened(SharedHead):
    """Changes pixels, which ids of tokens are not."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return client.task_loss(client.model(batch.x * 1.01), batch.y)


@dataclass(frozen=True)
class Classified(SharedHead):
    """Says that it predicts numbers, but needs classes."""

    targets = ("classes", "numbers")

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return F.cross_entropy(client.model(batch.x), batch.y.long())


@dataclass(frozen=True)
class NotANumber(SharedHead):
    """Divides by zero on the server."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, {k: Message(changed(m, float("nan"))) for k, m in uploads.items()})


PREVIOUS: list[int] = []


@dataclass(frozen=True)
class Ordered(SharedHead):
    """Clients learn from a global variable who worked before them."""

    def setup(self, server: Server) -> None:
        PREVIOUS.clear()
        super().setup(server)

    def local_update(self, client: Client) -> Message:
        PREVIOUS.append(client.card.id)
        return Message(changed(super().local_update(client), 1 / len(PREVIOUS)))


MERGED: dict[str, Tensor] = {}


@dataclass(frozen=True)
class Remembering(SharedHead):
    """Keeps the last heads in a global variable, which outlives the run."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        for name, value in server.state.head.state_dict().items():
            value += MERGED.get(name, torch.zeros(()))
            MERGED[name] = value.clone()


@dataclass(frozen=True)
class AtHome(SharedHead):
    """Sends other numbers from a worker process."""

    def local_update(self, client: Client) -> Message:
        message = super().local_update(client)
        return message if multiprocessing.parent_process() is None else Message(changed(message, 0.5))


@dataclass(frozen=True)
class Noisy(SharedHead):
    """Draws from torch's global generator."""

    def local_update(self, client: Client) -> Message:
        return Message(changed(super().local_update(client), float(torch.rand(()))))


@dataclass(frozen=True)
class Watched(SharedHead):
    """Counts predictions in the state of the client."""

    def prepare(self, client: Client) -> None:
        client.state.predicted = torch.zeros(())

    def predict(self, client: Client, x: Tensor) -> Tensor:
        client.state.predicted += 1
        return super().predict(client, x)


@dataclass(frozen=True)
class Peeking(SharedHead):
    """Looks at a number in a step."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        loss = super().loss(client, batch)
        return loss if loss.item() > 1 else 0.5 * loss


@dataclass(frozen=True)
class Understated(SharedHead):
    """Says that it sends nothing."""

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        return Traffic(0, 0)


@dataclass(frozen=True)
class Seedless(SharedHead):
    """Starts from the same weights whatever the seed."""

    def prepare(self, client: Client) -> None:
        for parameter in client.model.parameters():
            nn.init.constant_(parameter, 0.01)


@dataclass(frozen=True)
class Undone(SharedHead):
    """Throws its training away."""

    def local_update(self, client: Client) -> Message:
        with client.fork():
            return super().local_update(client)


@dataclass(frozen=True)
class Restarting(SharedHead):
    """Starts every round from the initial weights."""

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(client.task.start(client.card.model, client.card.id).state_dict())


@dataclass(frozen=True)
class Idle(SharedHead):
    """Merges nothing."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        pass


@dataclass(frozen=True)
class Complete(SharedHead):
    """Relies on every client's answer."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, {k: uploads[k] for k in server.cards})


@dataclass(frozen=True)
class Many(SharedHead):
    """Cannot work with a client that has one class."""

    def local_update(self, client: Client) -> Message:
        least, most = client.data["train"].labels().aminmax()
        return Message(changed(super().local_update(client), 1 / float(most - least)))


@dataclass(frozen=True)
class Raising(SharedHead):
    """Does not run."""

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        raise KeyError("head")


class Unused(nn.Module):
    """A backbone with a layer that nobody uses, and one that changes its images."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(shape[1] * shape[2], 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x.clamp_(min=0).flatten(1))


class Restless(nn.Module):
    """A backbone that draws and counts in eval mode, and whose scores depend on the batch."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.net = nn.Linear(shape[1] * shape[2], 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z = self.net(x.flatten(1))
        return z - z.mean(0) + torch.rand(()) * 0.1


def black(seed: int = 0) -> Dataset:
    """Random pixels of 0 to 1, cast to bytes; a class without images."""
    x, y = torch.rand(40, 1, 8, 8).to(torch.uint8), torch.arange(40) % 2
    return Dataset("black", x, y, ("a", "b", "c"))


def restless() -> Dataset:
    """Other images each time."""
    x = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8)
    return Dataset("restless", x, torch.arange(40) % 2, ("a", "b"))


def leaky() -> Dataset:
    """Test images that are training images, with another class."""
    x = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(10, 1, 8, 8) * 20
    return Dataset("leaky", torch.cat([x, x]), torch.arange(20) // 10, ("a", "b"), official=10)

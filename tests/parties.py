"""Clients and servers small enough to follow by hand: a few images of chosen bytes, a model given as layers.

Byte 0 becomes the number -1 and byte 255 becomes 1, both exactly, so features can be known without rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from conftest import new_folder
from pluribus.assembly import Assembly
from pluribus.client import Batch, Client, Local
from pluribus.data.federated import Data, Store
from pluribus.federation import Federation
from pluribus.inputs import Input
from pluribus.internal.batches import least_rows
from pluribus.message import Schema
from pluribus.method import Method
from pluribus.models import TwoPartModel
from pluribus.optim import Life, Opt, Rule
from pluribus.result import Result
from pluribus.server import Server
from pluribus.storage.folder import RunFolder
from pluribus.task import Card, Cards, Task

CPU = torch.device("cpu")
Sample = tuple[tuple[int, int], int]  # two pixels and a label


def task_of(classes: int, width: int, *, shape=(1, 1, 2), clients: int = 2, seed: int = 0) -> Task:
    return Task(classes, Input("image", shape), width, "pool", clients, rounds=3, seed=seed)


def card_of(k: int, task: Task, samples: int = 1, model: str = "toy") -> Card:
    return Card(k, model, samples, task.width or 0, ())


def data_of(x: Tensor, y: Sequence[int]) -> Data:
    """All images of a store, in order."""
    return Data(Store(x, torch.tensor(list(y), dtype=torch.long), CPU), torch.arange(len(x)))


def signs(rows: Sequence[Sequence[int]]) -> Tensor:
    """Images of one line of pixels, each -1 or 1."""
    return (torch.tensor(rows) > 0).to(torch.uint8).mul(255).view(len(rows), 1, 1, -1)


def noise(samples: int, shape=(1, 4, 4), seed: int = 0) -> Tensor:
    """Random images."""
    return torch.randint(0, 256, (samples, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def flat_split(pixels: int, classes: int, seed: int = 0, *before: nn.Module) -> TwoPartModel:
    """A linear model: the features are the pixels, after what stands before the flattening."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return TwoPartModel(nn.Sequential(*before, nn.Flatten()), nn.Linear(pixels, classes), pixels)


def client_of(
    model: TwoPartModel,
    data: Data | Mapping[str, Data],
    *,
    k: int = 0,
    classes: int = 2,
    rule: Rule | None = None,
    epochs: int = 1,
    batch: int = 10,
    seed: int = 0,
    life: Life = "round",
    opts: Mapping[str, Opt] | None = None,
    down: Schema | None = None,
) -> Client:
    """A client at the start of round 0."""
    sets = {"train": data} if isinstance(data, Data) else dict(data)
    task = task_of(classes, model.width, clients=k + 1, seed=seed)
    card = card_of(k, task, len(sets["train"]))
    client = Client(card, task, model, sets, Local(rule or Rule(), epochs, batch, life=life), CPU)
    channels, height, width = sets["train"].store.x.shape[1:]
    client.equip(opts or {"model": Opt(client.model)}, down or {}, least_rows(model, (channels, height, width)))
    client.begin(0, 0, {})
    return client


def public_party(
    method: Method, private: Sequence[Sample], public: Sequence[Sample], *, batch: int = 10, lr: float = 1.0
):
    """A client with a linear model on two pixels, all weights zero, and public samples of its own and of another."""
    samples = [*private, *public]
    store = Store(signs([pixels for pixels, _ in samples]), torch.tensor([y for _, y in samples]), CPU)
    rows = torch.arange(len(samples))
    half = len(private) + len(public) // 2
    shared = {0: Data(store, rows[len(private) : half]), 1: Data(store, rows[half:])}
    sizes = {k: len(data) for k, data in shared.items()}
    task = Task(2, Input("image", (1, 1, 2)), 2, "pool", clients=2, rounds=3, seed=0, public=sizes)
    model = flat_split(2, 2)
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    own = {"train": Data(store, rows[: len(private)])}
    client = Client(card_of(0, task, len(private)), task, model, own, Local(Rule(lr=lr), 1, batch), CPU, public=shared)
    method.prepare(client)
    client.state.fix()
    client.equip(method.optimizers(client), method.wires(task, client.card)[1].down)
    client.begin(0, 0, {})
    return client


def head_numbers(client: Client) -> tuple[list, list]:
    head = client.model.head
    return head.weight.tolist(), head.bias.tolist()


class GivenCards(Cards):
    """Cards as they are given."""

    def __init__(self, cards: Mapping[int, Card]) -> None:
        self._cards = cards

    def __getitem__(self, client: int) -> Card:
        return self._cards[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._cards)

    def __len__(self) -> int:
        return len(self._cards)

    def architectures(self) -> dict[str, int]:
        return {card.model: k for k, card in reversed(self._cards.items())}


def server_of(task: Task, samples: Mapping[int, int], model: str = "toy") -> Server:
    """A server that knows these clients by their number of samples."""
    return Server(task, GivenCards({k: card_of(k, task, n, model) for k, n in samples.items()}))


def federation_of(parts: Assembly) -> Federation:
    """A federation before its first round, to look at and to change."""
    return Federation(parts, RunFolder.create(new_folder()))


def run_through(federation: Federation) -> Result:
    """All its rounds."""
    try:
        return federation.run()
    finally:
        federation.folder.close()


def descend(client: Client, batch: Batch) -> Tensor:
    """The plainest step: cross-entropy downhill."""
    loss = nn.functional.cross_entropy(client.model(batch.x), batch.y)
    client.descend(loss)
    return loss


def copies(client: Client) -> dict[str, Tensor]:
    """Everything the client keeps, as it is now."""
    return {name: value.detach().clone() for name, value in client.tensors().items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Same names, same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

"""A model with one adapted layer, and servers and clients for it, small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from parties import GivenCards, card_of, data_of, signs, task_of
from pluribus.client import Client, Local
from pluribus.message import Message
from pluribus.methods._adapters import AdapterMethod
from pluribus.models import TwoPartModel
from pluribus.models.adapters import Adapter, adapters_of, attach_adapters
from pluribus.optim import Rule
from pluribus.server import Server

LAYER = "qkv"
INPUTS, OUTPUTS = 3, 2


class Attending(nn.Module):
    """A linear layer with the name of one for queries, keys and values."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.flat, self.qkv = nn.Flatten(), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.qkv(self.flat(x))


def toy(inputs: int = INPUTS, outputs: int = OUTPUTS) -> TwoPartModel:
    """All its weights are zero."""
    model = TwoPartModel(Attending(inputs, outputs), nn.Linear(outputs, 2), outputs)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def adapted(rank: int, scale: float = 1.0, folds: bool = False, **shape: int) -> TwoPartModel:
    """With an adapter of this rank."""
    model = toy(**shape)
    attach_adapters(model, rank, scale, folds)
    return model


def only(model: TwoPartModel) -> Adapter:
    """Its adapter."""
    (adapter,) = adapters_of(model).values()
    return adapter


def server_for(method: AdapterMethod, ranks: list[int], samples: list[int] | None = None, **shape: int) -> Server:
    """A server of clients with these ranks, with the state of round 0."""
    task = task_of(2, OUTPUTS, shape=(1, 1, INPUTS), clients=len(ranks))
    sizes = samples or [1] * len(ranks)
    cards = {k: card_of(k, task, n, f"toy@rank{r}") for k, (r, n) in enumerate(zip(ranks, sizes, strict=True))}
    server = Server(task, GivenCards(cards))
    method.allocate(server, adapted(max(ranks), method.scale(max(ranks)), method.folds(), **shape))
    return server


def client_for(method: AdapterMethod, rank: int, samples: list[list[int]], labels: list[int], **rule) -> Client:
    """A client of this rank at the start of round 0. Pixels are -1 or 1."""
    task = task_of(2, OUTPUTS, shape=(1, 1, INPUTS))
    card = card_of(0, task, len(samples), f"toy@rank{rank}")
    sets = {"train": data_of(signs(samples), labels)}
    client = Client(card, task, toy(), sets, Local(Rule(**rule), 1, 10), torch.device("cpu"))
    client.begin(0, 0, {})
    method.prepare(client)
    client.state.fix()
    client.equip(method.optimizers(client), {})
    client.begin(0, 0, {})
    return client


def upload(b: list[list[float]], a: list[list[float]], head: float = 0.0) -> Message:
    """Adapters, and a head that is the same number everywhere."""
    return Message(parts(b, a, head))


def parts(b: list[list[float]], a: list[list[float]], head: float = 0.0) -> Mapping[str, Tensor]:
    factors = {f"A.{LAYER}": torch.tensor(a), f"B.{LAYER}": torch.tensor(b)}
    return {**factors, "head.weight": torch.full((2, len(b)), head), "head.bias": torch.full((2,), head)}

"""What methods for adapters of different rank share: a frozen pretrained backbone, adapters of the client's rank, and a
head that all clients train and average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.errors import MismatchError, MissingSettingError
from pluribus.message import Field, Message, Wire
from pluribus.method import Method, Need
from pluribus.models import TwoPartModel
from pluribus.models.adapters import adapters_of, attach_adapters, check_adapters, frozen_names, parameters_beside
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.targets import TARGETS
from pluribus.task import Card, Cards, Task

A, B = "A.", "B."  # prefixes of the factors' names, followed by the path of a layer
Tensors = Mapping[str, Tensor]


class Factors(NamedTuple):
    """B (m, r) and A (r, n) of one layer."""

    b: Tensor
    a: Tensor

    def product(self) -> Tensor:
        """B A in double precision, so that server and clients round to the same numbers."""
        return self.b.double() @ self.a.double()


@dataclass(frozen=True)
class AdapterMethod(Method):
    """Base of methods that train adapters. Subclasses say what is sent, and what the server makes of it."""

    family = "adapters"
    targets = TARGETS
    needs = frozenset({Need.SAME_ARCHITECTURE, Need.PRETRAINED})
    capacity = "rank"
    views = ("before", "after")  # the papers evaluate the global model
    defaults = MappingProxyType(
        {
            "models": "tiny-vit-32",
            "image_size": 16,
            "capacity": "8,4,2",
            "batch_size": 16,
            "lr": 0.05,
            "momentum": 0.9,
        }
    )

    alone: bool = setting(False)
    """Exchange nothing: every client trains adapters and head of its own. The baseline of this method."""

    def scale(self, rank: int) -> float:
        """What the product of adapters of a rank is multiplied by."""
        raise NotImplementedError

    def folds(self) -> bool:
        """Whether products are added to the weights of the backbone."""
        return False

    def check(self, task: Task, cards: Cards) -> None:
        for card in cards.firsts():
            check_adapters(task.shape_of(card.model), rank_of(card), task.input, card.architecture)

    def skeleton(self, task: Task, card: Card) -> TwoPartModel:
        """The model of a client with its adapters, on the meta device."""
        model, rank = task.shape_of(card.model), rank_of(card)
        with torch.device("meta"):
            attach_adapters(model, rank, self.scale(rank), self.folds())
        return model

    def schema(self, task: Task, card: Card) -> Wire:
        return Wire() if self.alone else self.wire(self.skeleton(task, card))

    def wire(self, model: TwoPartModel) -> Wire:
        """The fields of messages to and from a client with this model."""
        raise NotImplementedError

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        rank = rank_of(client.card)
        attach_adapters(client.model, rank, self.scale(rank), self.folds())
        client.model.to(client.device)
        draw_adapters(client.model, client.draw("adapters"))
        client.frozen = tuple(f"model.{name}" for name in frozen_names(client.model))  # loaded again from their source

    def receive(self, client: Client, down: Message) -> None:
        if not self.alone:
            self.install(client, down)

    def install(self, client: Client, down: Message) -> None:
        """Install what the server sent."""
        raise NotImplementedError

    def local_update(self, client: Client) -> Message:
        self.train(client)
        return Message({} if self.alone else self.report(client))

    def train(self, client: Client) -> None:
        """Train adapters and head."""
        client.fit(self.step)

    def report(self, client: Client) -> Tensors:
        """What a client sends after training: its adapters and head."""
        return trained_parts(client.model)

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        if self.alone:
            return
        card = max(server.cards.firsts(), key=rank_of)
        model, rank = server.task.build(card.model, "global"), rank_of(card)
        attach_adapters(model, rank, self.scale(rank), self.folds())
        draw_adapters(model, server.draw("adapters"))
        self.allocate(server, model)

    def allocate(self, server: Server, model: TwoPartModel) -> None:
        """Allocate the server's state. `model` is a new global model with adapters of the largest rank."""
        raise NotImplementedError

    def download(self, server: Server, client: int) -> Message:
        return Message({} if self.alone else self.send(server, client))

    def send(self, server: Server, client: int) -> Tensors:
        """What the server sends to a client."""
        raise NotImplementedError

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if not self.alone:
            self.merge(server, uploads)

    def merge(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Merge the adapters and heads of clients."""
        raise NotImplementedError


def rank_of(card: Card) -> int:
    """The rank of a client's adapters."""
    capacity = card.capacity
    if capacity is None:
        raise MissingSettingError(
            f"client {card.id} ({card.model}) has no rank for its adapters: give ranks with --capacity, such as 8,4,2."
        )
    if capacity.kind != "rank":
        raise MismatchError(
            f"client {card.id} has the model '{card.model}', but adapters need a rank: write "
            f"{card.architecture}@rank4, or use --capacity."
        )
    return int(capacity.value)


def draw_adapters(model: TwoPartModel, generator: torch.Generator) -> None:
    """New adapters: A random, B zero."""
    for adapter in adapters_of(model).values():
        adapter.draw(generator)


def factors_of(model: TwoPartModel) -> Tensors:
    """The factors of all adapters, named as in messages."""
    adapters = adapters_of(model)
    return {A + path: one.a for path, one in adapters.items()} | {B + path: one.b for path, one in adapters.items()}


def trained_parts(model: TwoPartModel) -> dict[str, Tensor]:
    """All that a client trains: the factors of its adapters, its head and its projector."""
    return {**factors_of(model), **parameters_beside(model)}


def fields_of(parts: Tensors) -> dict[str, Field]:
    """The fields of these parts in a message."""
    return {name: Field(tuple(part.shape), kept=False, source="weights") for name, part in parts.items()}


@torch.no_grad()
def copy_parts(parts: Tensors, message: Message) -> None:
    """Copy what a message has under the names of these parts."""
    for name, part in parts.items():
        part.copy_(message.tensor(name))


def paths_of(parts: Iterable[str]) -> list[str]:
    """The paths of the adapted layers whose factors are among these names."""
    return [name.removeprefix(A) for name in parts if name.startswith(A)]


def factors_in(parts: Tensors, path: str) -> Factors:
    """The factors of one layer."""
    return Factors(parts[B + path], parts[A + path])


def parts_beside(parts: Tensors) -> dict[str, Tensor]:
    """All parts that are no factors: head and projector."""
    return {name: part for name, part in parts.items() if not name.startswith((A, B))}

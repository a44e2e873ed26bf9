"""Named parts of models that are averaged among clients of one width and layout, whatever else their models are.

The server keeps a mean of each part for each architecture, and whether anyone has sent the part yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pluribus.message import Field, Message
from pluribus.ops import client_weights, weighted_mean
from pluribus.server import Server
from pluribus.task import Card

Parts = Mapping[str, Tensor]


def fields(parts: Parts) -> dict[str, Field]:
    """The schema of messages with these parts, each way: a part comes down once someone has sent it."""
    return {name: Field(tuple(part.shape), kept=False, optional=True) for name, part in parts.items()}


def setup(server: Server, parts: Callable[[Card], Parts]) -> None:
    """Allocate the means; `parts` gives those of an architecture, without numbers."""
    found = {_start(card) + name: part.shape for card in server.cards.firsts() for name, part in parts(card).items()}
    server.state.means = {name: torch.zeros(shape) for name, shape in found.items()}
    server.state.known = {name: torch.zeros((), dtype=torch.bool) for name in found}


def known(server: Server, card: Card) -> dict[str, Tensor]:
    """The means for a client, as far as anyone like it has sent some."""
    sent = _of(server.state.known, card)
    return {name: mean for name, mean in _of(server.state.means, card).items() if sent[name]}


def average(server: Server, uploads: Mapping[int, Message]) -> None:
    """Means over whoever answered, by width and layout, weighted by n_k; a part that nobody sent stays."""
    for card in server.cards.firsts():
        sent = _of(server.state.known, card)
        for name, mean in _of(server.state.means, card).items():
            alike = {
                k: {name: upload.tensor(name)}
                for k, upload in uploads.items()
                if server.cards[k].width == card.width and name in upload and upload.tensor(name).shape == mean.shape
            }
            if alike:
                mean.copy_(weighted_mean(alike, client_weights(server, alike, "samples"))[name])
                sent[name].fill_(True)


@torch.no_grad()
def install(parts: Parts, down: Message) -> None:
    """Take over what came down of a client's live parts."""
    for name, part in parts.items():
        if name in down:
            part.copy_(down.tensor(name))


def _of(tensors: Parts, card: Card) -> dict[str, Tensor]:
    """What the server keeps for an architecture, by the name of the part."""
    start = _start(card)
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def _start(card: Card) -> str:
    return f"{card.model}:{card.width}:"

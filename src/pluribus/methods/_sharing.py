"""Named parts of models, averaged over clients with the same width and layout; the rest of the models may differ.

For each architecture the server keeps the mean of each part, and whether a client has sent the part yet.
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
    """The schema of uploads and downloads with these parts. A download has the parts that some client has sent."""
    return {n: Field(tuple(part.shape), kept=False, optional=True, source="weights") for n, part in parts.items()}


def setup(server: Server, parts: Callable[[Card], Parts]) -> None:
    """Allocate the means. `parts` returns the parts of an architecture on the meta device."""
    found = {_prefix(card) + name: part.shape for card in server.cards.firsts() for name, part in parts(card).items()}
    server.state.means = {name: torch.zeros(shape) for name, shape in found.items()}
    server.state.known = {name: torch.zeros((), dtype=torch.bool) for name in found}


def known(server: Server, card: Card) -> dict[str, Tensor]:
    """The means for a client, of the parts that similar clients have sent."""
    sent = _entries(server.state.known, card)
    return {name: mean for name, mean in _entries(server.state.means, card).items() if sent[name]}


def average(server: Server, uploads: Mapping[int, Message]) -> None:
    """Average parts of one width and layout, weighted by n_k. A part that no client sent does not change."""
    for card in server.cards.firsts():
        sent = _entries(server.state.known, card)
        for name, mean in _entries(server.state.means, card).items():
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
    """Copy the downloaded parts into the client's model."""
    for name, part in parts.items():
        if name in down:
            part.copy_(down.tensor(name))


def _entries(tensors: Parts, card: Card) -> dict[str, Tensor]:
    """The entries of an architecture, by the name of the part."""
    prefix = _prefix(card)
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _prefix(card: Card) -> str:
    return f"{card.model}:{card.width}:"

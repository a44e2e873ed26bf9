"""Which of a client's tensors its upload holds, and the model that the server can build from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pluribus.audit.rehearsal import Rehearsal, Tensors, Upload
from pluribus.client import Client
from pluribus.evaluate import rule_of
from pluribus.internal.steps import Map
from pluribus.models import TwoPartModel
from pluribus.ops import flatten, unflatten

MODEL = "model."
STATE = "state."
NEAR = 0.5  # of the distance that a client has moved: what is farther from its weights is no change of them


@dataclass(frozen=True)
class Known:
    """The tensors of a client that its upload holds, by their names there, and how many trained ones there are."""

    tensors: Tensors
    trained: int
    total: int

    @property
    def is_whole(self) -> bool:
        """Whether everything that the client trains is known."""
        return self.trained == self.total


def find_weights(rehearsal: Rehearsal, upload: Upload, fields: Mapping[str, Tensor]) -> Known | None:
    """The weights in some fields of an upload. None: none of them can be read as weights.

    A field is the tensor of its shape that is nearest to it: messages have names of their own, and noise may have been
    added. A vector as long as all trained weights is read as their change since the start of the round.
    """
    with rehearsal.at_upload(upload) as client:
        trained = _trained_names(client)
        found = _read_changes(client, upload, fields) or read_tensors(upload.end, fields)
    return Known(found, len(trained & found.keys()), len(trained)) if found else None


def _trained_names(client: Client) -> set[str]:
    """The names of all tensors that the client's optimizers move."""
    moved = {id(p) for optimizer in client.optimizers.values() for p in optimizer.parameters.values()}
    named = {f"{MODEL}{name}": p for name, p in client.model.named_parameters()}
    named |= {f"{STATE}{name}": p for name, p in client.state.named_parameters()}
    return {name for name, p in named.items() if id(p) in moved}


def read_tensors(end: Tensors, fields: Mapping[str, Tensor]) -> Tensors:
    """The nearest tensor of each field; among equal ones, one with the same end of the name."""
    found: Tensors = {}
    for name, value in fields.items():
        known = {
            own: other
            for own, other in end.items()
            if _is_of_module(own) and other.shape == value.shape and own not in found
        }
        if known and value.dim():
            gaps = {own: float((other.double() - value.double()).norm()) for own, other in known.items()}
            found[min(gaps, key=lambda own: (gaps[own], not own.endswith(name.rpartition(".")[2])))] = value
    return found


def _is_of_module(name: str) -> bool:
    """Whether a tensor belongs to a model. Others that a method keeps are no weights."""
    return name.startswith(MODEL) or (name.startswith(STATE) and "." in name.removeprefix(STATE))


def _read_changes(client: Client, upload: Upload, fields: Mapping[str, Tensor]) -> Tensors:
    """The weights after a change that one field holds as a vector."""
    parameters = {f"{MODEL}{name}": p for name, p in client.model.named_parameters() if p.requires_grad}
    if not parameters.keys() <= upload.start.keys():
        return {}
    start, end = (flatten(of, parameters) for of in (upload.start, upload.end))
    for value in fields.values():
        if value.shape == start.shape and (start + value - end).norm() < NEAR * (end - start).norm():
            return unflatten(start + value, parameters)
    return {}


@contextmanager
def rebuilt(rehearsal: Rehearsal, upload: Upload, known: Known) -> Iterator[tuple[Client, Map]]:
    """The client as the server can build it, and the function that gives scores: an untrained client with the uploaded
    tensors, and with the downloads that the server itself has sent."""
    with rehearsal.untrained(upload.client) as client, torch.no_grad():
        live = client.tensors()
        sent = {name: value for name, value in upload.end.items() if name.startswith("got.")}
        for name, value in {**sent, **known.tensors}.items():
            if name in live:
                live[name].copy_(value)
        yield client, _scores(rehearsal, client, known)


def _scores(rehearsal: Rehearsal, client: Client, known: Known) -> Map:
    """The method's own rule, or the small model that clients share, if that is what was sent."""
    for name, module in client.state.named_children():
        if isinstance(module, TwoPartModel) and all(one.startswith(f"{STATE}{name}.") for one in known.tensors):
            return partial(_score, module)
    return rule_of(rehearsal.parts.method, "after")


def _score(module: TwoPartModel, client: Client, x: Tensor) -> Tensor:
    scores: Tensor = module(x)
    return scores

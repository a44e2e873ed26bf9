"""Client-level privacy at a trusted server: clients clip their messages, and noise is added to the mean of them.

The method gets the noised mean in place of every message, so whatever it computes from uploads is computed from that
mean. One of n clients moves the mean by at most 2 C / n, and noise has the standard deviation `noise` times that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pluribus import draws
from pluribus.message import Message, Rows, Schema, Value
from pluribus.method import Method, PeerMethod
from pluribus.privacy.messages import add_noise, count_messages, find_multiplier
from pluribus.privacy.sampling import Randomness
from pluribus.privacy.terms import Terms
from pluribus.task import Cards, Task

Uploads = Mapping[int, Message]


class NoisedMean:
    """Replaces the uploads of an exchange by their mean with noise, those of one layout together."""

    def __init__(self, terms: Terms, method: Method, task: Task, cards: Cards) -> None:
        self._terms, self._seed = terms, task.seed
        self._noise = max(find_multiplier(terms, count_messages(method, task, card)[1]) for card in cards.firsts())

    def of_messages(self, uploads: Mapping[int, Message], schemas: Mapping[int, Schema], t: int, stage: int) -> Uploads:
        """The messages that a method may see. Which model a client has is no secret, and neither is its layout."""
        if self._terms.transparent:
            return uploads
        layouts: dict[object, list[int]] = {}
        for k in sorted(uploads):
            layouts.setdefault(_layout(uploads[k]), []).append(k)
        found: dict[int, Message] = {}
        for group, clients in enumerate(layouts.values()):
            mean = _mean([uploads[k] for k in clients])
            deviation = 2 * self._noise * self._terms.clip / len(clients)
            seed = draws.generator(self._seed, "privacy", "mean", t, stage, group).initial_seed()
            randomness = Randomness(None if self._terms.secure else seed, torch.device("cpu"))
            noised = add_noise(mean, schemas[clients[0]], deviation, randomness)
            found |= dict.fromkeys(clients, noised)
        return {k: found[k] for k in uploads}


def why_no_mean(method: Method, schemas: list[Schema]) -> str:
    """Why a method cannot work with the mean of all messages. `schemas`: of enrolment. Empty: it can."""
    if isinstance(method, PeerMethod):
        return "it has no server that could noise a mean. Use --dp-level client."
    if method.defends_itself or "median" not in method.defenses:
        return "its server needs the messages of single clients, not their mean. Use --dp-level client."
    if any(schemas):
        return "clients send a message when they enroll, one by one. Use --dp-level client."
    return ""


def _layout(message: Message) -> object:
    return tuple((n, tuple((v.value if isinstance(v, Rows) else v).shape)) for n, v in sorted(message.items()))


def _mean(messages: list[Message]) -> Message:
    """The mean of each number, in double precision. Integers are those that the server sent: they stay."""
    fields: dict[str, Value] = {}
    for name, first in messages[0].items():
        if isinstance(first, Rows):
            fields[name] = Rows(_mean_of([one.rows(name).value for one in messages]), first.held)
        elif first.is_floating_point():
            fields[name] = _mean_of([one.tensor(name) for one in messages])
        else:
            fields[name] = first
    return Message(fields)


def _mean_of(values: list[Tensor]) -> Tensor:
    return torch.stack([value.double() for value in values]).mean(0)

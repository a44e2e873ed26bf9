"""Client-level privacy: every message is clipped as a whole and noised, before it leaves the client.

Neighbors differ by one client, whose rows are all replaced by as many others. A clipped message lies within C of its
start, which the receiver knows: so another client's message is at most 2 C away, and noise has the standard deviation
`noise` times 2 C. With a trusted server, clients only clip, and central.py noises the mean. Training is plain. Whatever
a message says in another way than by numbers says nothing: all classes are sent, and integers are sent back as they
were downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.internal.vectors import bounded, floats, length, shortened, starts
from pluribus.message import Dim, Message, Rows, Schema, Value, Wire
from pluribus.method import Method
from pluribus.privacy.account import Account
from pluribus.privacy.accountant import Spend, find_noise
from pluribus.privacy.sampling import Randomness
from pluribus.privacy.terms import Terms
from pluribus.task import Card, Task

VARIANCE = "running_var"  # of batch norm, which takes its root
RATE = 1.0  # every client that works sends a message: sampling of clients is not counted


class MessageGuard(Account):
    """Protects the clients of a host as a whole. Other rows of a client change little of what it sends."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._uploads: dict[int, tuple[int, int]] = {}  # of each client: messages of a round, and of the whole run

    def begin(self, method: Method, client: Client) -> None:
        """Choose the noise of a client before it first works."""
        if client.card.id not in self._uploads:
            self._uploads[client.card.id] = count_messages(method, client.task, client.card)

    def rehearse(self, method: Method, client: Client) -> None:
        """Refuse, before round 0, noise with which the budget does not last for one round."""
        self.begin(method, client)
        if not self.terms.transparent:
            self.check_first_round(client, self._round(client))

    def affords_round(self, client: Client) -> bool:
        """Whether the budget of a client allows one more round."""
        return self.terms.transparent or self.affords(client, self._round(client))

    def protect(self, client: Client, message: Message, schema: Schema, about: Message | None) -> Message:
        """The message that a client sends in place of this one, on the CPU. It is paid for first."""
        if self.terms.transparent or not schema:
            return message
        noise = self._multiplier(client)
        self.charge(client, Spend(noise, RATE, 1))
        clipped = clip_message(message, about, self.terms.clip)
        if self.terms.level == "client-central":
            return in_form(clipped, schema)  # the server noises the mean
        return add_noise(clipped, schema, 2 * noise * self.terms.clip, self.randomness(client, "message", on="cpu"))

    def _round(self, client: Client) -> list[Spend]:
        uploads, _ = self._uploads[client.card.id]
        return [Spend(self._multiplier(client), RATE, uploads)]

    def _multiplier(self, client: Client) -> float:
        _, times = self._uploads[client.card.id]
        return find_multiplier(self.terms, times)


@cache
def find_multiplier(terms: Terms, times: int) -> float:
    """The noise multiplier with which the budget lasts for so many messages."""
    if terms.noise is not None or not times:
        return terms.noise or 0.0
    return find_noise(terms.epsilon, terms.delta, lambda noise: [Spend(noise, RATE, times)])


def count_messages(method: Method, task: Task, card: Card) -> tuple[int, int]:
    """How many messages a client sends in a round, and in the whole run if it takes part in every round."""
    wires = method.wires(task, card)
    uploads = sum(bool(wire.up) for wire in wires)
    return uploads, sum(bool(wire.once) for wire in wires) + task.rounds * uploads


def clip_message(message: Message, about: Message | None, clip: float) -> Message:
    """The message at a distance of at most `clip` to its start. It names all classes, and no integer of its own.

    Plain tensors start from what was downloaded under the same name, everything else from zero.
    """
    known = {} if about is None else about.part()
    plain = message.part()
    vector = floats(plain) | {name: value.value for name, value in message.items() if isinstance(value, Rows)}
    start = starts(floats(plain), known)
    far = length(vector, start)
    kept = shortened(vector, start, clip / far) if far > clip else vector
    fields: dict[str, Value] = {}
    for name, value in message.items():
        if isinstance(value, Rows):
            fields[name] = Rows(kept[name], torch.ones_like(value.held))
        else:
            fields[name] = kept[name] if name in kept else known.get(name, torch.zeros_like(value))
    return Message(fields)


def add_noise(message: Message, schema: Schema, deviation: float, randomness: Randomness) -> Message:
    """The message with noise of this deviation in every number, and then within its bounds."""

    def noised(value: Tensor) -> Tensor:
        noise = torch.empty(value.shape, dtype=torch.float64)
        randomness.fill_normal(noise)
        return value + deviation * noise

    return in_form(message, schema, noised)


def in_form(message: Message, schema: Schema, change: Callable[[Tensor], Tensor] = lambda value: value) -> Message:
    """The message with its numbers changed, in their declared types and within their bounds."""

    def formed(name: str, value: Tensor) -> Tensor:
        declared = schema[name]
        least = 0.0 if name.endswith(VARIANCE) else declared.least
        return bounded(change(value).to(declared.dtype), least, declared.most)

    fields: dict[str, Value] = {}
    for name, value in message.items():
        if isinstance(value, Rows):
            fields[name] = Rows(formed(name, value.value), value.held)
        else:
            fields[name] = formed(name, value) if value.is_floating_point() else value
    return Message(fields)


def why_not_noised(method: Method, task: Task, cards: Sequence[Card]) -> str:
    """Why noise cannot hide what the messages of a method say about a client. Empty: it can."""
    for wire in (wire for card in cards for wire in method.wires(task, card)):
        for name, reason in _told(wire):
            return f"{reason} ('{name}')."
    return ""


def _told(wire: Wire) -> list[tuple[str, str]]:
    """What the form of a message would tell, by field: no noise of numbers hides that."""
    found = []
    for name, declared in {**wire.once, **wire.up}.items():
        if declared.optional:
            found.append((name, "which fields it sends depends on a client's rows"))
        elif any(isinstance(size, Dim) for size in declared.shape) and declared.source != "public":
            found.append((name, "the size of what it sends depends on a client's rows"))
        elif not declared.dtype.is_floating_point and not (name in wire.down and declared.source == "weights"):
            found.append((name, "it sends integers, which cannot be noised here"))
    return found

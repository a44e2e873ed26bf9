"""Two rounds of a case without the loop: what many promises look at, and none may change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pluribus.assembly import Assembly
from pluribus.client import Client
from pluribus.conformance.by_hand import ByHand
from pluribus.conformance.cases import Case
from pluribus.host import Host, make_host
from pluribus.internal.steps import Eager, Fit


@dataclass(frozen=True)
class Worked:
    """The rounds of a case, worked by hand: the answers, the server before and after each round, all tensors at the
    end, and what the last round started from."""

    hand: ByHand
    answers: list[dict[tuple[int, int], bytes | None]]
    server: list[dict[str, Tensor]]
    tensors: dict[str, Tensor]
    at_start: dict[str, Tensor]


def worked(case: Case) -> Worked:
    """All rounds, in which the last one listens."""
    parts = case.parts()
    last = parts.task.rounds - 1
    start = _Start(last)
    hand = ByHand(parts, listening=last, runner=start)
    answers, server = [], [server_of(hand)]
    for t in range(parts.task.rounds):
        answers.append(hand.round(t, present(parts, t)))
        server.append(server_of(hand))
    return Worked(hand, answers, server, hand.tensors(), start.seen)


class _Start(Eager):
    """Runs steps as they are written, and notes what a client's first fit of one round starts from."""

    def __init__(self, t: int) -> None:
        self._t = t
        self.seen: dict[str, Tensor] = {}

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        if client.round == self._t:
            self.seen |= {key: value for key, value in trained_by(client).items() if key not in self.seen}
        return super().fit(client, fit)


def server_of(hand: ByHand) -> dict[str, Tensor]:
    """Copies of the server's tensors."""
    return {name: value.clone() for name, value in hand.server.state.state_dict().items()}


def present(parts: Assembly, t: int) -> list[int]:
    """The clients of a round: those that the method chooses, or all."""
    chosen = parts.method.participants(parts.task, t)
    return sorted(parts.cards if chosen is None else chosen)


def born(case: Case) -> dict[str, Tensor]:
    """What will be trained, before anything was."""
    parts = case.seen_parts
    return trained(make_host(parts, lambda k: None), parts.cards)


def trained(host: Host, clients: Iterable[int]) -> dict[str, Tensor]:
    """Everything that an optimizer of a client moves, by client and optimizer, as one vector."""
    return {key: value for k in clients for key, value in trained_by(host.client(k)).items()}


def trained_by(client: Client) -> dict[str, Tensor]:
    """The same of one client."""
    return {
        f"client {client.card.id} {name}": torch.cat([p.detach().flatten() for p in optimizer.parameters.values()])
        for name, optimizer in client.optimizers.items()
    }

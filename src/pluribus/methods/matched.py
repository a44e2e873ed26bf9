"""FedAvg and FedProx with the bandwidth of FedH2L, as its paper compares them (Li et al., 2021, Table 2).

Nodes train on their own data, one step a round, and average their models as often as the bytes of FedH2L's posteriors
would pay for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.errors import RangeError
from pluribus.message import Message, Wire, payload
from pluribus.method import Need, Sizes, Traffic, register
from pluribus.methods.fedavg import FedAvg
from pluribus.methods.fedh2l import SETTINGS, Ind
from pluribus.methods.fedprox import FedProx
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Task

FLOAT = 4  # bytes


@register("fedavg-matched")
@dataclass(frozen=True)
class FedAvgMatched(Ind, FedAvg):
    """FedAvg that averages as rarely as FedH2L's bandwidth allows."""

    up = "the model, in some rounds"
    down = "the global model, in some rounds"
    needs = frozenset({Need.SAME_MODEL, Need.PUBLIC_DATA})
    views = ("before", "after")  # the global model is what all nodes share
    defaults = MappingProxyType({**SETTINGS, "models": "mlp-64"})

    matched_batch: int = setting(32, at_least=1, symbol="B")
    """Public samples per round of the FedH2L run whose bandwidth is matched."""

    def check(self, task: Task, cards: Mapping[int, Card]) -> None:
        if not self.synchronisations(task, cards[0]):
            raise RangeError(
                f"what FedH2L sends in {task.rounds} rounds does not pay for one upload of {cards[0].model}: use "
                f"--rounds {-(-self._model_bytes(task, cards[0]) // self._round_bytes(task))} or more, or a smaller "
                f"model."
            )

    def synchronisations(self, task: Task, card: Card) -> int:
        """R_sync = floor(R (B M + 1) / P), at most one a round."""
        return min(task.rounds, task.rounds * self._round_bytes(task) // self._model_bytes(task, card))

    def _round_bytes(self, task: Task) -> int:
        """What a node of FedH2L sends in a round: B M posteriors and an accuracy."""
        return FLOAT * (self.matched_batch * task.classes + 1)

    def _model_bytes(self, task: Task, card: Card) -> int:
        return payload(self.wires(task, card)[0].up, 0, {})

    def synchronises(self, task: Task, card: Card, t: int) -> bool:
        """Whether models are averaged after the step of round t: evenly spaced, and in the last round."""
        times = self.synchronisations(task, card)
        return (t + 1) * times // task.rounds > t * times // task.rounds

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        full, share = super().traffic(task, card, sizes), self.synchronisations(task, card) / task.rounds
        return Traffic(full.up * share, full.down * share)

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        """Who misses a download goes on from what it has; at first that is what all derive from the common seed."""
        super().prepare(client)
        client.state.shared = self.part(client.task.build(client.card.model, "global")).requires_grad_(False)
        self.part(client.model).load_state_dict(client.state.shared.state_dict())

    def receive(self, client: Client, down: Message) -> None:
        super().receive(client, down)
        client.state.shared.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message | None:
        super().local_update(client)  # one step on private and own public data
        due = self.synchronises(client.task, client.card, client.t)
        return Message.of(self.part(client.model)) if due else None

    def adapt(self, client: Client, view: str) -> None:
        """Between synchronisations the view `before` is the last global model, too."""
        self.part(client.model).load_state_dict(client.state.shared.state_dict())

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        super().setup(server)
        server.state.averaged_in = torch.tensor(-1)  # the round

    def download(self, server: Server, client: int) -> Message | None:
        """The global model in the round after it changed; and in the evaluation of the round in which it did."""
        return super().download(server, client) if int(server.state.averaged_in) >= server.t - 1 else None

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        server.state.averaged_in = torch.tensor(server.t)


@register("fedprox-matched")
@dataclass(frozen=True)
class FedProxMatched(FedAvgMatched, FedProx):
    """FedProx that averages as rarely as FedH2L's bandwidth allows."""

    def schema(self, task: Task, card: Card) -> Wire:
        return FedAvg.schema(self, task, card)  # the last global model lies in the state already

    def anchor(self, client: Client) -> Mapping[str, Tensor]:
        return dict(client.state.shared.named_parameters())

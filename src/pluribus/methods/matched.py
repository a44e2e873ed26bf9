"""FedAvg and FedProx with the bandwidth of FedH2L, as its paper compares them (Li et al., 2021, Table 2).

Clients take one step per round on their own data. They average their models in as many rounds as the upload bytes of
FedH2L's posteriors allow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.errors import RangeError
from pluribus.message import Message, payload
from pluribus.method import Need, Sizes, Traffic, register
from pluribus.methods.fedavg import FedAvg
from pluribus.methods.fedprox import drift
from pluribus.methods.ind import SETTINGS, Ind, own_and_public
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task

FLOAT = 4  # bytes


@register("fedavg-matched")
@dataclass(frozen=True)
class FedAvgMatched(FedAvg):
    """FedAvg that averages as rarely as FedH2L's bandwidth allows."""

    paper = Ind.paper
    up = "the model, in some rounds"
    down = "the global model, in some rounds"
    needs = frozenset({Need.SAME_MODEL, Need.PUBLIC_DATA, Need.PUBLIC_LABELS})
    defaults = MappingProxyType({**SETTINGS, "models": "mlp-64"})

    matched_batch: int = setting(32, at_least=1, symbol="B")
    """Public samples per round of the FedH2L run with the same bandwidth."""

    def check(self, task: Task, cards: Cards) -> None:
        if not self.synchronizations(task, cards[0]):
            needed = -(-self._model_bytes(task, cards[0]) // self._round_bytes(task))
            raise RangeError(
                f"FedH2L sends fewer bytes in {task.rounds} rounds than one upload of {cards[0].model} has: use "
                f"--rounds {needed} or more, or a smaller model."
            )

    def synchronizations(self, task: Task, card: Card) -> int:
        """R_sync = floor(R (B M + 1) / P), at most one per round."""
        return min(task.rounds, task.rounds * self._round_bytes(task) // self._model_bytes(task, card))

    def _round_bytes(self, task: Task) -> int:
        """Upload bytes of a FedH2L client per round: B M posteriors and an accuracy."""
        return FLOAT * (self.matched_batch * task.classes + 1)

    def _model_bytes(self, task: Task, card: Card) -> int:
        return payload(self.wires(task, card)[0].up, 0, {})

    def synchronizes(self, task: Task, card: Card, t: int) -> bool:
        """Whether models are averaged after the step of round t. These rounds are evenly spaced; the last is one."""
        times = self.synchronizations(task, card)
        return (t + 1) * times // task.rounds > t * times // task.rounds

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        full, share = super().traffic(task, card, sizes), self.synchronizations(task, card) / task.rounds
        return Traffic(full.up * share, full.down * share)

    # ---- client ----------------------------------------------------------------------------------------------------

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model, life="run")}

    def prepare(self, client: Client) -> None:
        """Start from the common initial model. A client that misses a download continues from its own model."""
        client.data["local"] = own_and_public(client, everyones=False)
        client.state.shared = self.part(client.task.build(client.card.model, "global")).requires_grad_(False)
        self.part(client.model).load_state_dict(client.state.shared.state_dict())

    def receive(self, client: Client, down: Message) -> None:
        super().receive(client, down)
        client.state.shared.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message | None:
        client.fit(self.step, on="local", steps=1)
        due = self.synchronizes(client.task, client.card, client.t)
        return Message.of(self.part(client.model)) if due else None

    def adapt(self, client: Client, view: str) -> None:
        """Between synchronizations, too, the view `before` is the last global model."""
        self.part(client.model).load_state_dict(client.state.shared.state_dict())

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        super().setup(server)
        server.state.averaged_in = torch.tensor(-1)  # the round

    def download(self, server: Server, client: int) -> Message | None:
        """The global model, in the round after it changed and in the evaluation of the round in which it changed."""
        return super().download(server, client) if int(server.state.averaged_in) >= server.t - 1 else None

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        server.state.averaged_in = torch.tensor(server.t)


@register("fedprox-matched")
@dataclass(frozen=True)
class FedProxMatched(FedAvgMatched):
    """FedProx that averages as rarely as FedH2L's bandwidth allows."""

    mu: float = setting(0.01, at_least=0, symbol="mu")
    """Weight of the squared distance to the global model. 0 is FedAvg."""

    def loss(self, client: Client, batch: Batch) -> Tensor:
        anchor = dict(client.state.shared.named_parameters())  # the last global model
        return super().loss(client, batch) + self.mu / 2 * drift(self.part(client.model), anchor)

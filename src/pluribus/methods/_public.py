"""The base of FedMD, FCCL and KT-pFL: in each round, clients send what they predict for the same public rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from pluribus.client import Client, Data
from pluribus.errors import PartitionError
from pluribus.message import Field, Message, Wire
from pluribus.method import Method, Need
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task


@dataclass(frozen=True)
class OnPublicRows(Method):
    """Clients exchange predictions for public rows, which all of them draw from the common seed."""

    family = "knowledge"
    needs = frozenset({Need.PUBLIC_DATA})
    defaults = MappingProxyType({"public_fraction": 0.1})

    align: int = setting(64, at_least=1, symbol="N_a")
    """Public samples for the exchange of logits, drawn again in every round."""

    def check(self, task: Task, cards: Cards) -> None:
        if not self.aligned(task):
            raise PartitionError("no client has enough data for a public sample: use a larger --public-fraction.")

    def aligned(self, task: Task) -> int:
        """Number of public samples of a round."""
        return min(self.align, sum(task.public.values()))

    def prepare(self, client: Client) -> None:
        client.data["pool"] = Data.join(client.public.values())


@dataclass(frozen=True)
class MeanLogits(OnPublicRows):
    """Clients get the mean of all logits."""

    up = "logits on this round's public samples"
    down = "their mean over clients"

    def schema(self, task: Task, card: Card) -> tuple[Wire, Wire]:
        logits = {"logits": Field((self.aligned(task), task.classes), source="public")}
        return Wire(up=logits), Wire(down=logits)

    def show(self, client: Client) -> Message:
        """Communicate: send the class scores of this round's public samples."""
        return Message({"logits": client.sweep(self.predict, alignment(client, self.align))})

    def setup(self, server: Server) -> None:
        server.state.consensus = torch.zeros(self.aligned(server.task), server.task.classes)

    def agree(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Aggregate: average over the clients that answered."""
        server.state.consensus = torch.stack([upload.tensor("logits") for upload in uploads.values()]).mean(0)

    def consensus(self, server: Server, client: int) -> Message:
        """Distribute: send the mean logits."""
        return Message({"logits": server.state.consensus})


def alignment(client: Client, size: int) -> Data:
    """This round's public samples, stratified by class. All clients derive them from the common seed.

    In a random order, sample r of the n samples of a class has rank (r + 1/2) / n. The samples with the lowest ranks
    are taken; on a tie, those that come first in that order.
    """
    pool = client.data["pool"]
    order = torch.randperm(len(pool), generator=client.task.draw("align", client.t)).to(client.device)
    labels = pool.labels()[order]
    by_class = labels.argsort(stable=True)
    grouped = labels[by_class]
    first, end = torch.searchsorted(grouped, grouped), torch.searchsorted(grouped, grouped, right=True)
    rank = (torch.arange(len(pool), device=client.device) - first + 0.5) / (end - first)
    lowest = rank[by_class.argsort()].argsort(stable=True)[:size]
    return pool[order[lowest]]

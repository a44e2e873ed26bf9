"""Your own method in one file: clients pull the features of a class toward a mean that all clients share.

    pluribus.run(PrototypePull(pull=0.5), clients=4, rounds=2)

On the command line, it is named by its dotted path:

    pluribus run --method examples.my_method.PrototypePull --rounds 5
    pluribus run --method examples.my_method.PrototypePull --rounds 5 --pull 0.1 --against local
    pluribus run --method examples.my_method.PrototypePull --help

The idea is from FedProto (Tan et al., AAAI 2022). It needs only features of one width, so models may differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus import Batch, Card, Client, Field, Message, Method, Need, Rows, Server, Task, Wire, setting
from pluribus.ops import class_means


@dataclass(frozen=True)
class PrototypePull(Method):
    """Features are pulled toward the mean of their class over all clients."""

    paper = "an example, after Tan et al., AAAI 2022"
    up = "mean feature of each held class"
    down = "mean feature of each known class"
    needs = frozenset({Need.SAME_WIDTH})

    pull: float = setting(1.0, at_least=0, symbol="lambda")
    """Weight of the distance to the shared class means."""

    def schema(self, task: Task, card: Card) -> Wire:
        """What may travel: one vector of K numbers per class, each way."""
        means = {"means": Field((task.classes, card.width), form="rows", source="class sums")}
        return Wire(down=means, up=means)

    def setup(self, server: Server) -> None:
        """No class has a shared mean yet."""
        server.state.value = torch.zeros(server.task.classes, server.cards[0].width)
        server.state.held = torch.zeros(server.task.classes, dtype=torch.bool)

    def download(self, server: Server, client: int) -> Message:
        """The shared means, the same for everyone. The client finds them in `client.got`."""
        return Message({"means": Rows(server.state.value, server.state.held)})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy, and lambda times the squared distance to the mean of the label's class, where it is known."""
        z = client.features(batch.x)
        shared = client.got["means"]
        known = shared.held[batch.y, None]  # all False in the first round: no branch is needed
        distance = F.mse_loss(z * known, shared.value[batch.y] * known)
        return F.cross_entropy(client.model.head(z), batch.y) + self.pull * distance

    def local_update(self, client: Client) -> Message:
        """Train for E epochs, then send the mean of every class that the client holds."""
        client.fit(self.step)
        return Message({"means": class_means(client)})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Average each class over the clients that sent it. A class that nobody sent keeps its last mean."""
        sent = [upload.rows("means") for upload in uploads.values()]
        senders = torch.stack([rows.held for rows in sent]).sum(0)
        means = torch.stack([rows.value for rows in sent]).sum(0) / senders.clamp(min=1)[:, None]
        reported = senders > 0
        server.state.value[reported] = means[reported]
        server.state.held |= reported

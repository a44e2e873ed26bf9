"""FedGH (Yi et al., ACM MM 2023): clients send mean features per class; the server trains a global head on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F

from pluribus.client import Client
from pluribus.message import Field, Message, Wire, schema_of
from pluribus.method import Method, Need, register
from pluribus.ops import class_means, sgd_step
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Task


@register("fedgh")
@dataclass(frozen=True)
class FedGH(Method):
    """Train a global head on the server, from the clients' mean feature of each class."""

    paper = "Yi et al., ACM MM 2023"
    family = "knowledge"
    up = "mean feature of each held class"
    down = "the global head"
    needs = frozenset({Need.SAME_WIDTH, Need.SAME_HEAD})
    views = ("after", "before")

    server_lr: float = setting(0.01, at_least=0, symbol="eta_theta")
    """Learning rate of the global head."""
    server_step: Literal["class", "client"] = "class"
    """One step on the global head per class mean, as in Eq. 4, or one per client, over all its class means."""

    def schema(self, task: Task, card: Card) -> Wire:
        head = schema_of(task.shape_of(card.model).head)
        return Wire(down=head, up={"means": Field((task.classes, card.width), form="rows", source="class sums")})

    def setup(self, server: Server) -> None:
        server.state.head = server.task.build(server.cards[0].model, "global").head  # theta^0

    def download(self, server: Server, client: int) -> Message:
        return Message.of(server.state.head)

    def receive(self, client: Client, down: Message) -> None:
        client.model.head.load_state_dict(down.part())  # omega_k = phi_k o theta, Eq. 5

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)  # Eq. 6
        return Message({"means": class_means(client)})  # Eq. 3

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        head = server.state.head
        for upload in uploads.values():
            means = upload.rows("means")
            labels = means.held.nonzero().flatten()
            size = 1 if self.server_step == "class" else len(labels)
            for y in torch.split(labels, size):
                sgd_step(head, F.cross_entropy(head(means.value[y]), y), self.server_lr)  # Eq. 4

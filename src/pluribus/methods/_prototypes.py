"""The base of FedProto and FedTGP."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.message import Field, Wire
from pluribus.method import Method, Need
from pluribus.ops import distance_to_rows, nearest
from pluribus.settings import setting
from pluribus.task import Card, Task


@dataclass(frozen=True)
class Prototypes(Method):
    """Clients pull features toward the prototype of their class, and classify by the nearest prototype."""

    family = "knowledge"
    up = "mean feature of each held class"
    down = "prototype of each known class"
    needs = frozenset({Need.SAME_WIDTH})
    views = ("before", "after")  # the trained features with the newest prototypes, and with the client's own head

    pull: float = setting(1.0, at_least=0, symbol="lambda")
    """Weight of the distance to the prototypes."""

    def schema(self, task: Task, card: Card) -> Wire:
        prototypes = {"prototypes": Field((task.classes, card.width), form="rows", source="class sums")}
        return Wire(down=prototypes, up=prototypes)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return self.pulled(client, client.features(batch.x), batch.y)

    def pulled(self, client: Client, z: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy plus lambda times the distance from features to the known prototypes of their class."""
        distance = distance_to_rows(z, client.got.rows("prototypes"), y)
        return client.task_loss(client.model.head(z), y) + self.pull * distance

    def predict(self, client: Client, x: Tensor) -> Tensor:
        """Predict by the nearest prototype; by the head while no prototype is known."""
        z, prototypes = client.features(x), client.got.rows("prototypes")
        return torch.where(prototypes.held.any(), nearest(z, prototypes), client.model.head(z))

    def predict_after(self, client: Client, x: Tensor) -> Tensor:
        """Predict by the client's own head."""
        return client.model(x)  # type: ignore[no-any-return]

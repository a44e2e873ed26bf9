"""FedProto (Tan et al., AAAI 2022): clients share the mean feature of each class, and classify by the nearest one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.errors import ConflictError
from pluribus.message import Field, Message, Rows, Wire
from pluribus.method import register
from pluribus.methods._prototypes import Prototypes
from pluribus.ops import Tally, rows_mean
from pluribus.server import Server
from pluribus.task import Card, Cards, Task


@register("fedproto")
@dataclass(frozen=True)
class FedProto(Prototypes):
    """Pull features toward the mean feature of their class over clients, and classify by the nearest mean."""

    paper = "Tan et al., AAAI 2022"

    weighting: Literal["uniform", "samples"] = "uniform"
    """Weights of clients in the mean of a class: equal, or their samples of the class, which are then sent."""
    rebuild: bool = False
    """Delete the prototype of a class that no client reports in a round. Off: keep it."""
    last_epoch: bool = False
    """Compute prototypes from the last local epoch only, not from all epochs."""

    def schema(self, task: Task, card: Card) -> Wire:
        wire = super().schema(task, card)
        counts = {"counts": Field((task.classes,), torch.int32, least=0, source="statistic")}
        return Wire(down=wire.down, up={**wire.up, **(counts if self.weighting == "samples" else {})})

    def check(self, task: Task, cards: Cards) -> None:
        if self.weighting == "samples" and not task.share_counts:
            raise ConflictError(
                "--weighting samples sends how many rows a client has: use --weighting uniform with --no-share-counts."
            )

    def prepare(self, client: Client) -> None:
        client.state.seen = Tally(client.task.classes, client.card.width)

    def local_update(self, client: Client) -> Message:
        seen, epochs = client.state.seen, client.local.epochs
        if self.last_epoch and epochs > 1:
            client.fit(self.step, epochs=epochs - 1)
            epochs = 1
        seen.reset()
        client.fit(self.step, epochs=epochs)
        counts = {"counts": seen.counts.int()} if self.weighting == "samples" else {}
        return Message({"prototypes": seen.means(), **counts})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        z = client.features(batch.x)
        client.state.seen.add(batch.y, z)  # of the model before the step, in train mode
        return self.pulled(client, z, batch.y)

    def setup(self, server: Server) -> None:
        server.state.value = torch.zeros(server.task.classes, server.cards[0].width)
        server.state.held = torch.zeros(server.task.classes, dtype=torch.bool)

    def download(self, server: Server, client: int) -> Message:
        return Message({"prototypes": Rows(server.state.value, server.state.held)})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, sent = server.state, uploads.values()
        weights = [upload.tensor("counts") for upload in sent] if self.weighting == "samples" else None
        mean = rows_mean([upload.rows("prototypes") for upload in sent], weights)
        if not self.rebuild:
            mean = Rows(torch.where(mean.held[:, None], mean.value, state.value), mean.held | state.held)
        state.value, state.held = mean.value, mean.held

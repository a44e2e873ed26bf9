"""FedTGP (Zhang et al., AAAI 2024): the server trains prototypes, separated by an adaptive margin."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.message import Message, Rows
from pluribus.method import register
from pluribus.methods._prototypes import Prototypes
from pluribus.ops import class_means, onehot, rows_mean
from pluribus.optim import Rule
from pluribus.server import Server
from pluribus.settings import setting


@register("fedtgp")
@dataclass(frozen=True)
class FedTGP(Prototypes):
    """FedProto with prototypes that the server trains to be separated by a margin."""

    paper = "Zhang et al., AAAI 2024"
    down = "trained prototype of each class"

    threshold: float = setting(100.0, at_least=0, symbol="tau")
    """Upper bound of the margin."""
    server_epochs: int = setting(100, at_least=0, symbol="S")
    """Epochs of the server over the clients' prototypes in each round."""
    server_batch: int = setting(10, at_least=1, symbol="B")
    """Batch size of the server, in prototypes."""
    server_lr: float = setting(0.01, at_least=0, symbol="eta")
    """Learning rate of the server."""

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message({"prototypes": class_means(client)})

    def setup(self, server: Server) -> None:
        classes, width = server.task.classes, server.cards[0].width
        server.state.net = server.task.make(
            "trainable prototypes",
            lambda: nn.Sequential(
                nn.Embedding(classes, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)
            ),
        )
        server.optimize("net", server.state.net, Rule(lr=self.server_lr))
        server.state.trained = torch.zeros((), dtype=torch.bool)

    def prototypes(self, server: Server) -> Tensor:
        """T(c) of all classes."""
        return server.state.net(torch.arange(server.task.classes, device=server.device))  # type: ignore[no-any-return]

    def download(self, server: Server, client: int) -> Message:
        """No row is held before the server has trained."""
        held = server.state.trained.expand(server.task.classes)
        return Message({"prototypes": Rows(self.prototypes(server), held)})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sent = [upload.rows("prototypes") for upload in uploads.values()]
        points = torch.cat([rows.value[rows.held] for rows in sent])
        labels = torch.cat([rows.held.nonzero().flatten() for rows in sent])
        if not len(points):
            return
        margin = self.margin(rows_mean(sent))
        server.fit(
            self.contrast,
            points,
            labels,
            opts=("net",),
            batch=self.server_batch,
            epochs=self.server_epochs,
            shuffle="order",
            given={"margin": torch.tensor(margin)},
        )
        server.state.trained.fill_(True)
        server.notes["margin"] = margin

    def contrast(self, server: Server, batch: Batch) -> Tensor:
        """Cross-entropy of the negative distances, where the own class is further away by the margin."""
        distances = margined(batch.x, self.prototypes(server), batch.y, server.given["margin"])
        return F.cross_entropy(-distances, batch.y)

    def margin(self, means: Rows) -> float:
        """delta_t: the largest distance from a class to its nearest neighbor, at most tau; tau for one class."""
        known = means.value[means.held]
        if len(known) < 2:
            return self.threshold
        gaps = distances(known, known).fill_diagonal_(torch.inf).amin(1)
        return min(float(gaps.max()), self.threshold)


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Euclidean distances between all rows, from their differences. The gradient at distance 0 is 0."""
    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")


def margined(points: Tensor, prototypes: Tensor, y: Tensor, margin: Tensor | float) -> Tensor:
    """Distances from points to all prototypes, plus the margin for the prototype of the own class."""
    return distances(points, prototypes) + margin * onehot(y, len(prototypes))

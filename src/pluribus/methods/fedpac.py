"""FedPAC (Xu et al., ICLR 2023): a shared body aligned by class centroids, and heads combined for each client."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.message import Field, Message, Rows, Wire, schema_of
from pluribus.method import register
from pluribus.methods._classifier_weights import combining_weights
from pluribus.methods.fedrep import FedRep
from pluribus.ops import (
    average_uploads,
    class_means,
    distance_to_rows,
    double,
    onehot,
    row_means,
    rows_mean,
    weighted_mean,
)
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Task


@register("fedpac")
@dataclass(frozen=True)
class FedPAC(FedRep):
    """Average bodies whose features are pulled to global class centroids; combine heads anew for each client."""

    paper = "Xu et al., ICLR 2023"
    up = "the model, class means before and after training, class counts and a variance"
    down = "the global body, the client's combined head and the class centroids"
    targets = ("classes",)
    defenses = ("clip", "krum")  # the server combines the heads of single clients
    unbounded = "the variance of features that it sends has no bound for one row."

    head_epochs: int = setting(1, at_least=1, symbol="E_phi")
    """Epochs on the head in each round, before --epochs on the body."""
    pull: float = setting(1.0, at_least=0, symbol="lambda")
    """Weight of the distance of features to the global centroid of their class."""

    def schema(self, task: Task, card: Card) -> Wire:
        model = schema_of(task.shape_of(card.model))
        means = Field((task.classes, card.width), form="rows", source="class sums")
        statistics = {
            "counts": Field((task.classes,), torch.int32, least=0, source="statistic"),
            "variance": Field((), least=0, source="statistic"),
        }
        return Wire(down=model | {"centroids": means}, up=model | {"centroids": means, "means": means} | statistics)

    # ---- client ----------------------------------------------------------------------------------------------------

    def receive(self, client: Client, down: Message) -> None:
        client.model.load_state_dict(down.part())

    def local_update(self, client: Client) -> Message:
        statistics = _statistics(client)  # of the features that the client has received
        super().local_update(client)  # the head, then the body
        return Message({**Message.of(client.model), "centroids": class_means(client), **statistics})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        """The loss of the body: cross-entropy plus lambda times the distance to known centroids."""
        z = client.features(batch.x)
        distance = distance_to_rows(z, client.got.rows("centroids"), batch.y)
        return client.task_loss(client.model.head(z), batch.y) + self.pull * distance

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        model, state, clients = server.task.build(server.cards[0].model, "global"), server.state, len(server.cards)
        state.shared = model.features
        state.heads = {
            name: value.expand(clients, *value.shape).clone() for name, value in model.head.state_dict().items()
        }
        shape = server.task.classes, server.cards[0].width
        state.centroids = Rows(torch.zeros(shape), torch.zeros(shape[0], dtype=torch.bool))

    def download(self, server: Server, client: int) -> Message:
        head = {f"head.{name}": value[client] for name, value in server.state.heads.items()}
        return Message({**Message.of(server.state.shared, "features"), **head, "centroids": server.state.centroids})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, sent = server.state, list(uploads.values())
        state.shared.load_state_dict(average_uploads(server, uploads, "features", self.weighting))
        counts = [upload.tensor("counts") for upload in sent]
        mean = rows_mean([upload.rows("centroids") for upload in sent], counts)
        known = state.centroids  # the centroid of a class that nobody reports now does not change
        value = torch.where(mean.held[:, None], mean.value, known.value)
        state.centroids = Rows(value, mean.held | known.held)
        variances = torch.stack([upload.tensor("variance") for upload in sent])
        weights = combining_weights(torch.stack([_moments(upload) for upload in sent]), variances)
        heads = {k: upload.part("head") for k, upload in uploads.items()}
        for i, row in zip(uploads, weights.tolist(), strict=True):
            combined = weighted_mean(heads, dict(zip(uploads, row, strict=True)))
            for name, head in combined.items():
                state.heads[name][i] = head
        own = {str(i): float(weights[at, at]) for at, i in enumerate(uploads)}
        server.notes |= {"own_weight": sum(own.values()) / len(own), "own_weights": own}


def _statistics(client: Client) -> dict[str, Tensor | Rows]:
    """Mean feature mu^y and number of samples per class, and V = sum_y (p(y) E[|f|^2 | y] - p(y)^2 |mu^y|^2) / n."""
    members, z = onehot(client.data["train"].labels(), client.task.classes), client.sweep(Client.features)
    counts, n = members.sum(0), max(len(z), 1)
    means = row_means(members.T @ z, counts)
    moments = double(means.value) * double(counts / n)[:, None]
    variance = (double(z).square().sum() / n - moments.square().sum()) / n
    return {"means": means, "counts": counts.int(), "variance": variance.clamp(min=0).float()}


def _moments(upload: Message) -> Tensor:
    """h^y = p(y) mu^y for all classes."""
    counts = upload.tensor("counts").double()
    return upload.rows("means").value.double() * (counts / counts.sum().clamp(min=1))[:, None]

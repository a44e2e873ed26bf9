"""Membership inference: can one tell from a model, or from an upload, which rows a client has trained on?

Every attack gives each row one number. Rows of the training set should have higher ones than rows of the test set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pluribus.audit.inversion import angle
from pluribus.audit.measures import Scores
from pluribus.client import Batch, Client
from pluribus.data.federated import Data
from pluribus.internal.steps import Map
from pluribus.message import Rows

MOST_ROWS = 1000  # of the training rows and of the test rows of a client

MOST_GRADIENTS = 40  # rows of each set, if a gradient is computed for each of them

Gradient = Callable[[Batch], Sequence[Tensor]]  # of private rows, as it is uploaded
RowScores = Callable[[Data], Tensor]


def by_loss(client: Client, rule: Map) -> Scores:
    """Minus the loss of each row: models have smaller losses on what they have trained on."""

    def score(data: Data) -> Tensor:
        return -client.task.target.loss(client.sweep(rule, data), data.labels(), reduction="none")

    return _scores(client, score)


def by_distance(client: Client, rule: Map, means: Rows) -> Scores:
    """Minus the distance of each row to the uploaded vector of its class: a mean is nearer to what is in it."""

    def score(data: Data) -> Tensor:
        gap: Tensor = client.sweep(rule, data) - means.value[data.labels()]
        return -gap.square().sum(1).sqrt()

    return _held(_scores(client, score), means.held)


def by_nearest(client: Client, rule: Map, rows: Tensor) -> Scores:
    """Minus the distance of each row to the nearest uploaded row."""

    def score(data: Data) -> Tensor:
        return -torch.cdist(client.sweep(rule, data), rows).amin(1)

    return _scores(client, score)


def _scores(client: Client, score: RowScores) -> Scores:
    members, others = (_some(client.data[name]) for name in ("train", "test"))
    return Scores(score(members), score(others), _classes(client, members), _classes(client, others))


def _some(data: Data) -> Data:
    """Evenly spaced rows of a large set."""
    return data[:: -(-len(data) // MOST_ROWS) or 1]


def _classes(client: Client, data: Data) -> Tensor:
    """The class of each row. Rows without a class are all compared with each other."""
    labels = data.labels()
    return labels if client.task.target.kind == "classes" else torch.zeros(len(data), dtype=torch.int64)


def _held(scores: Scores, held: Tensor) -> Scores:
    """Only rows of classes that were uploaded."""
    members, others = held[scores.member_class], held[scores.other_class]
    return Scores(
        scores.members[members], scores.others[others], scores.member_class[members], scores.other_class[others]
    )


def by_gradient(client: Client, gradient: Gradient, target: Sequence[Tensor], batch: Data) -> Scores:
    """The cosine between the gradient that a row gives alone and the uploaded one, for rows of its batch."""

    def score(data: Data) -> Tensor:
        x, y = data.take(torch.arange(len(data)))
        one_by_one = [Batch(x[i : i + 1], y[i : i + 1], torch.tensor([i]), 1) for i in range(len(data))]
        return torch.tensor([1 - float(angle(gradient(one), target)) for one in one_by_one])

    client.sweep(Client.features, batch[:1])  # evaluation mode: one row has no statistics
    others = client.data["test"][:MOST_GRADIENTS]
    batch = batch[:MOST_GRADIENTS]
    return Scores(score(batch), score(others), _classes(client, batch), _classes(client, others))

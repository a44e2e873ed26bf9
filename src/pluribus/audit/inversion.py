"""Inversion: images that would explain an upload, found by descent from noise, beside the images behind it.

The attacker is given the client's own model and the labels, which a server often lacks: an upper bound for this attack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus import draws
from pluribus.audit.measures import psnr, total_variation
from pluribus.client import Batch, Client
from pluribus.data.federated import Data
from pluribus.internal.steps import Map
from pluribus.message import Rows
from pluribus.ops import derivable

SMOOTH = 0.02  # weight of the total variation of pixels in [0, 1] at first; it falls to zero
PACE = 0.05  # of a step, as a share of the span of pixels
MOST_LOOKED_AT = 1000  # rows of a set, for its mean and for the nearest one

Match = Callable[[Tensor], Tensor]


class Span(NamedTuple):
    """The smallest and the largest value of a pixel, as models get it."""

    low: float
    high: float

    @classmethod
    def of(cls, data: Data) -> Span:
        if data.store.x.dtype == torch.uint8 and data.scale is None:
            return cls(-1.0, 1.0)
        x = take(data)[0]
        return cls(float(x.min()), max(float(x.max()), float(x.min()) + 1e-6))

    @property
    def size(self) -> float:
        return self.high - self.low


class Guess(NamedTuple):
    """An image behind an upload, what the attack made of it, and a guess that needs no upload."""

    label: int
    original: Tensor
    found: Tensor
    psnr: float
    without: float | None  # PSNR of the mean image of the class in the test rows
    nearest: Tensor | None = None  # the training row that the found image resembles most
    nearest_psnr: float | None = None


def take(data: Data) -> tuple[Tensor, Tensor]:
    """Some rows of a set, as models get them, and their labels."""
    return data.take(torch.arange(0, len(data), -(-len(data) // MOST_LOOKED_AT) or 1))


def descend(match: Match, shape: Sequence[int], span: Span, steps: int, *key: draws.Key) -> Tensor:
    """The rows that match best, of all that gradient descent visits. It starts from gray with a little noise."""
    noise = torch.randn(tuple(shape), generator=draws.generator("audit inversion", *key))
    x = ((span.low + span.high) / 2 + 0.1 * span.size * noise).clamp(*span).requires_grad_()
    optimizer = torch.optim.Adam([x], lr=PACE * span.size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1), eta_min=PACE * span.size / 50)
    best, least = x.detach().clone(), math.inf
    for step in range(steps):
        gap = match(x)
        if (now := float(gap.detach())) < least:
            best, least = x.detach().clone(), now
        smooth = SMOOTH * (1 - step / steps) * total_variation(x) / span.size
        (x.grad,) = torch.autograd.grad(gap + smooth, [x])
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(*span)
    return best


def angle(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """1 - the cosine between two lists of tensors, each as one vector."""
    a, b = (torch.cat([part.flatten() for part in parts]) for parts in (one, other))
    return 1 - F.cosine_similarity(a, b, dim=0)


def invert_means(
    client: Client, rule: Map, means: Rows, classes: Sequence[int], steps: int, *key: draws.Key
) -> list[Guess]:
    """For each class, an image whose features are the uploaded mean."""
    target = means.value[list(classes)].flatten(1)
    span, train, test = Span.of(client.data["train"]), take(client.data["train"]), take(client.data["test"])
    size = target.square().sum(1).clamp(min=1e-12)

    def gap(x: Tensor) -> Tensor:
        return ((rule(client, x).flatten(1) - target).square().sum(1) / size).mean()

    client.sweep(rule, client.data["train"][:1])  # evaluation mode, as the means were made
    found = descend(gap, (len(classes), *client.task.shape), span, steps, *key)
    return [_guess_mean(label, image, train, test, span) for label, image in zip(classes, found, strict=True)]


def _guess_mean(
    label: int, found: Tensor, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], span: Span
) -> Guess:
    own, others = (x[y == label] for x, y in (train, test))
    mean = own.mean(0)
    without = psnr(others.mean(0), mean, span.size) if len(others) else None
    nearest = own[(own - found).flatten(1).square().sum(1).argmin()]
    near = psnr(found, nearest, span.size)
    return Guess(label, mean, found, psnr(found, mean, span.size), without, nearest, near)


def invert_gradient(
    client: Client,
    batch: Batch,
    gradient: Callable[[Batch], Sequence[Tensor]],
    target: Sequence[Tensor],
    steps: int,
    *key: draws.Key,
) -> list[Guess]:
    """Rows with the labels of a batch whose gradient has the direction of the uploaded one, beside those of the batch.

    `gradient` must be differentiable in the rows.
    """
    from scipy.optimize import linear_sum_assignment  # here, because its import takes a quarter of a second

    span, others = Span.of(client.data["train"]), take(client.data["test"])

    def gap(x: Tensor) -> Tensor:
        return angle(gradient(batch._replace(x=x)), target)

    with derivable(client):
        found = descend(gap, batch.x.shape, span, steps, *key)
    errors = (batch.x[:, None] - found[None]).flatten(2).square().mean(2)
    rows, matches = linear_sum_assignment(errors.numpy())
    guesses = []
    for row, match in zip(rows.tolist(), matches.tolist(), strict=True):
        label, original = int(batch.y[row]), batch.x[row]
        same = others[0][others[1] == label]
        without = psnr(same.mean(0), original, span.size) if len(same) else None
        guesses.append(Guess(label, original, found[match], psnr(found[match], original, span.size), without))
    return guesses


def task_gradient(client: Client, names: Sequence[str]) -> Callable[[Batch], Sequence[Tensor]]:
    """The gradient of the task's loss for some weights of the model, as a function of the rows."""
    theta: Mapping[str, Tensor] = dict(client.model.named_parameters())

    def gradient(batch: Batch) -> Sequence[Tensor]:
        loss = client.task_loss(client.call(batch.x, theta), batch.y)
        return torch.autograd.grad(loss, [theta[name] for name in names], create_graph=True, materialize_grads=True)

    return gradient

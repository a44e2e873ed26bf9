"""Parts of a step of Per-FedAvg: splits of a batch, gradients at other parameters, products with the Hessian."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.ops import backward_again, derivable

Parameters = Mapping[str, Tensor]


def split(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into disjoint parts. If a part would have fewer than two samples, each part is the whole batch."""
    if batch.n < 2 * parts:
        return [batch] * parts
    sizes = [batch.n // parts] * (parts - 1)
    sizes.append(batch.n - sum(sizes))
    pieces = zip(*(torch.split(value, sizes) for value in batch[:3]), sizes, strict=True)
    return [Batch(x, y, i, n) for x, y, i, n in pieces]


def moved(theta: Parameters, direction: Parameters, rate: float) -> dict[str, Tensor]:
    """theta + rate * direction; parameters without a direction do not change."""
    return {n: value + rate * direction[n] if n in direction else value for n, value in theta.items()}


def gradient(client: Client, theta: Parameters, batch: Batch) -> dict[str, Tensor]:
    """The gradient of the loss at other parameters. The client does not change."""
    theta = {name: value.detach().requires_grad_() for name, value in theta.items()}
    loss = client.task_loss(client.call(batch.x, theta), batch.y)
    return _gradient(loss, theta)


def hessian_product(client: Client, theta: Parameters, direction: Parameters, batch: Batch) -> dict[str, Tensor]:
    """The Hessian of the loss times a direction, by differentiating gradient times direction."""
    theta = {name: value.detach().requires_grad_() for name, value in theta.items()}
    with derivable(client):
        loss = client.task_loss(client.call(batch.x, theta), batch.y)
        slope = _gradient(loss, theta, create_graph=True)
        along = torch.stack([(slope[name] * direction[name]).sum() for name in slope]).sum()
        backward_again(client, along, "--variant hessian-free or --variant first-order")
    return {name: value.grad for name, value in theta.items() if value.grad is not None}


def _gradient(value: Tensor, theta: Parameters, create_graph: bool = False) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, list(theta.values()), allow_unused=True, create_graph=create_graph)
    return {name: g for name, g in zip(theta, found, strict=True) if g is not None}

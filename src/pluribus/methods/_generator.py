"""The generator of FedGen: it generates features for labels, the inputs of heads, not images."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.ops import double, onehot


class Generator(nn.Module):
    """G(y, eps): generates a feature for a label."""

    def __init__(self, noise: int, classes: int, hidden: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        self.inner = nn.Linear(noise + classes, hidden, bias=False)  # batch norm would cancel a bias
        self.norm, self.outer = nn.BatchNorm1d(hidden), nn.Linear(hidden, width)

    def forward(self, eps: Tensor, y: Tensor) -> Tensor:
        """Generate a feature for each row of noise and its label."""
        hidden = self.norm(self.inner(torch.cat([eps, onehot(y, self.classes)], 1)))
        return self.outer(F.relu(hidden))  # type: ignore[no-any-return]


class Frozen(Generator):
    """The generator on a client: it stays in eval mode while the client trains."""

    def train(self, mode: bool = True) -> Self:
        """Stay frozen and in eval mode."""
        self.requires_grad_(False)
        return super().train(False)


def alikeness(eps: Tensor, made: Tensor) -> Tensor:
    """The diversity loss: near 1 if features are similar although their noise differs, near 0 if they differ."""
    apart = (eps[:, None] - eps).square().mean(2) * (made[:, None] - made).abs().mean(2)
    return (-apart.mean()).exp()


def label_at(edges: Tensor, u: Tensor) -> Tensor:
    """Map numbers in [0, 1) to labels by their cumulative shares. A label without a share is never drawn.

    >>> label_at(torch.tensor([0.0, 0.25, 0.25, 1.0]), torch.tensor([0.0, 0.2, 0.25, 0.9]))
    tensor([1, 1, 3, 3])
    """
    return (double(u)[..., None] * edges[-1] >= edges).sum(-1).clamp(max=len(edges) - 1).to(u.device)

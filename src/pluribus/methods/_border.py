"""The border of learned pixels that pFedPT adds to every image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SPREAD = 0.1  # standard deviation of the initial prompts; images are in [-1, 1]


class Border(nn.Module):
    """x + delta, where delta (c, H, W) is learned in a border of `width` pixels and zero inside it."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        channels, height, across = shape
        self.inside = height - 2 * width, across - 2 * width
        self.rows = nn.Parameter(SPREAD * torch.randn(channels, 2 * width, across))
        self.sides = nn.Parameter(SPREAD * torch.randn(channels, self.inside[0], 2 * width))

    def delta(self) -> Tensor:
        """The prompt as an image."""
        top, bottom = self.rows.chunk(2, 1)
        left, right = self.sides.chunk(2, 2)
        inside = left.new_zeros(len(left), *self.inside)
        return torch.cat([top, torch.cat([left, inside, right], 2), bottom], 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.delta()

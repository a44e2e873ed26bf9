"""Gray images for networks with three input channels."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from pluribus.models.probe import Shape


class GrayToColor(nn.Module):
    """Repeat the only channel three times, without a copy."""

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(-1, 3, -1, -1)


def takes_gray(net: nn.Module, shape: Shape) -> nn.Module:
    """Return `net` for color images, and `net` after `GrayToColor` for images with one channel."""
    return nn.Sequential(OrderedDict(color=GrayToColor(), net=net)) if shape[0] == 1 else net

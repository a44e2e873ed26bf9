"""Grey images for networks that were drawn for three colours."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from pluribus.models.probe import Shape


class GreyToColour(nn.Module):
    """Repeat the one channel three times, without copying it."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W) to (B, 3, H, W)."""
        return x.expand(-1, 3, -1, -1)


def takes_grey(net: nn.Module, shape: Shape) -> nn.Module:
    """`net` itself for colour images; for images of one channel, `net` behind the repetition."""
    return nn.Sequential(OrderedDict(colour=GreyToColour(), net=net)) if shape[0] == 1 else net

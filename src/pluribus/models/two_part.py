"""A model in two parts: features that map an image to K numbers, and a head that maps them to logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class TwoPartModel(nn.Module):
    """`features` then `head`. Methods that share, replace or compare one part address it by these names."""

    def __init__(self, features: nn.Module, head: nn.Module, width: int) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self.width = width  # K, the width of the features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


class Pool(nn.Module):
    """Average pooling to a common width: 2048 -> 512 averages four neighbors, 64 -> 512 repeats each number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        # torch would read (B, D) as one sample with B channels.
        return F.adaptive_avg_pool1d(x.unsqueeze(1), self.width).squeeze(1)

    def extra_repr(self) -> str:
        return f"width={self.width}"


PROJECTORS = ("pool", "linear", "none")


def projection(projector: str, native: int, width: int) -> nn.Module:
    """The layer from a backbone's `native` width to the common width. Equal widths need no projection."""
    if native == width:
        return nn.Identity()
    return Pool(width) if projector == "pool" else nn.Linear(native, width)

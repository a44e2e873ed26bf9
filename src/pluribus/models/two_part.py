"""A model in two parts: features that give K numbers for an image, and a head that turns them into logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class TwoPartModel(nn.Module):
    """`features` then `head`. Methods that share, replace or compare one part address it by these names."""

    def __init__(self, features: nn.Module, head: nn.Module, width: int) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self.width = width  # K, what `features` gives

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        logits: Tensor = self.head(self.features(x))
        return logits


class Pool(nn.Module):
    """Adaptive average pooling along the flat feature vector, the papers' way to a common width.

    2048 -> 512 averages four neighbours, 64 -> 512 repeats every number eight times.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """(B, D) to (B, width)."""
        # Given (B, D) as it is, torch would take the batch for channels.
        return F.adaptive_avg_pool1d(x.unsqueeze(1), self.width).squeeze(1)

    def extra_repr(self) -> str:
        """What `print(model)` shows between the brackets."""
        return f"width={self.width}"


PROJECTORS = ("pool", "linear", "none")


def projection(projector: str, native: int, width: int) -> nn.Module:
    """From a backbone's `native` width to the agreed one. A width that is right already needs no projection."""
    if native == width:
        return nn.Identity()
    return Pool(width) if projector == "pool" else nn.Linear(native, width)

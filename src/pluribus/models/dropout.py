"""Dropout by key: which units fall out is a function of a key and a position, not of a generator's state.

Two engines, two devices or two visiting orders then drop the same units, and a captured step needs no generator.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from pluribus.draws import BITS, uniform_bits


class Dropout(nn.Module):
    """`nn.Dropout` with a key. Whoever trains sets the key; every forward pass in train mode moves it on."""

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """In train mode zero with chance p, scaled so that the mean stays; in eval mode nothing happens."""
        if not self.training or self.p == 0:
            return x
        kept = uniform_bits(self.key, x.numel(), x.device).view(x.shape) >= int(self.p * 2**BITS)
        self.key.add_(1)
        return torch.where(kept, x / (1 - self.p), 0.0)

    def extra_repr(self) -> str:
        """What `print(model)` shows between the brackets."""
        return f"p={self.p}"


M = TypeVar("M", bound=nn.Module)


def with_keys(module: M) -> M:
    """The module with every `nn.Dropout` in it replaced."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))
    return module


def set_keys(module: nn.Module, key: int) -> None:
    """Give every dropout layer its own masks under this key."""
    for number, layer in enumerate(part for part in module.modules() if isinstance(part, Dropout)):
        layer.key.fill_((key ^ (number << 32)) >> 1)

"""Dropout by key: the dropped units depend on a key and a position, not on a generator's state.

So different engines, devices and visiting orders drop the same units, and a captured step needs no generator.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from pluribus.draws import BITS, uniform_bits


class Dropout(nn.Module):
    """`nn.Dropout` with a key. The training loop sets the key. Every forward pass in train mode increments it."""

    key: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """In train mode, zero each unit with probability p and scale the others to keep the mean."""
        if not self.training or self.p == 0:
            return x
        kept = uniform_bits(self.key, x.numel(), x.device).view(x.shape) >= int(self.p * 2**BITS)
        self.key.add_(1)
        return torch.where(kept, x / (1 - self.p), 0.0)

    def extra_repr(self) -> str:
        return f"p={self.p}"


M = TypeVar("M", bound=nn.Module)


def replace_dropout(module: M) -> M:
    """Replace every `nn.Dropout` in a module by `Dropout`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))
    return module


def set_dropout_keys(module: nn.Module, key: int) -> None:
    """Give every dropout layer its own key, derived from this one."""
    for number, layer in enumerate(part for part in module.modules() if isinstance(part, Dropout)):
        layer.key.fill_((key ^ (number << 32)) >> 1)

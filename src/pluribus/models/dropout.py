"""Dropout by key: which units fall out is a function of a key and a position, not of a generator's state.

Two engines, two devices or two visiting orders then drop the same units, and a captured step needs no generator.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

# The mixing steps of SplitMix64, in two's complement: torch has 64-bit integers with a sign only.
_STRIDE = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_BITS = 24  # of the hash decide; float32 holds them exactly


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
        kept = uniform_bits(self.key, x.numel(), x.device).view(x.shape) >= int(self.p * 2**_BITS)
        self.key.add_(1)
        return torch.where(kept, x / (1 - self.p), 0.0)

    def extra_repr(self) -> str:
        """What `print(model)` shows between the brackets."""
        return f"p={self.p}"


def uniform_bits(key: Tensor, size: int, device: torch.device) -> Tensor:
    """So many whole numbers below 2**24, by key and position."""
    mixed = torch.arange(size, device=device) + _mixed(key * _STRIDE)
    bits: Tensor = (_mixed(mixed * _STRIDE) >> (63 - _BITS)) & (2**_BITS - 1)
    return bits


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor  # the mask makes it a shift without sign
    return x ^ ((x >> 31) & (2**33 - 1))


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

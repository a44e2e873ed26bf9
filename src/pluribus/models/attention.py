"""Transformer blocks for sequences of any kind, and the mean over a sequence.

They are written out, so that they can be stacked and differentiated twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 4


class Block(nn.Module):
    """A pre-norm transformer block: attention, then two linear layers, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Change tokens (n, length, width). `mask` (n, length) says which of them are seen. None: all."""
        x = x + self.proj(self._attend(self.norm1(x), mask))
        mixed: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return mixed

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        # Plain products instead of a fused kernel: on a GPU those add gradients in an order that is not fixed.
        scores = q @ k.transpose(2, 3) * (width // HEADS) ** -0.5
        if mask is not None:
            # not minus infinity: a row without any token would become NaN
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        mixed: Tensor = scores.softmax(3) @ v
        return mixed.transpose(1, 2).reshape(rows, length, width)


class Blocks(nn.Module):
    """Several blocks, and a last normalization."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        normed: Tensor = self.norm(x)
        return normed


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the values (n, length, width) of each row's tokens."""
    seen = mask[..., None].to(values.dtype)
    return (values * seen).sum(1) / seen.sum(1).clamp(min=1)

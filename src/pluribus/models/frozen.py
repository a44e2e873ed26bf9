"""A frozen backbone, to which a method attaches parts that learn: prompts, adapters."""

from __future__ import annotations

from typing import Self

from torch import nn


class Frozen(nn.Module):
    """A frozen backbone, `net`. It stays in eval mode, with its batch-norm statistics, even while a model trains."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.net.eval()
        return self

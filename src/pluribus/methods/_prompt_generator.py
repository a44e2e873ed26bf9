"""The prompt generator of pFedPG, which uses cross-attention and is trained on the server."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Generator(nn.Module):
    """P_i = P_base + CrossAttn(Q = v_i; K, V = P_base). The attention output of v_i is added to every token."""

    def __init__(self, base: Tensor, clients: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        width, inner = base.shape[1], heads * head_width
        self.base = nn.Parameter(base.detach().clone())
        # separate parameters, so that the optimizer skips clients that did not take part
        self.descriptors = nn.ParameterList(torch.randn(width) for _ in range(clients))
        self.query, self.key, self.value = (_uniform(inner, width, fan_in=width) for _ in range(3))
        self.out = _uniform(width, inner, fan_in=inner)
        self.out_bias = _uniform(width, fan_in=inner)

    def forward(self, client: int) -> Tensor:
        """P_i (n, d)."""
        q = self._heads(self.descriptors[client][None], self.query)
        k, v = self._heads(self.base, self.key), self._heads(self.base, self.value)
        found = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)  # (1, inner)
        return self.base + F.linear(found, self.out, self.out_bias)

    def _heads(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """(heads, tokens, head_width)."""
        return F.linear(tokens, weight).view(len(tokens), self.heads, -1).transpose(0, 1)


def _uniform(*shape: int, fan_in: int) -> nn.Parameter:
    """The default initial weights of a linear layer."""
    return nn.Parameter((torch.rand(shape) * 2 - 1) / fan_in**0.5)

"""The hypernetwork of pFedLA. The server trains one per client; it computes the weights that mix layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, DEPTH = 100, 3  # width of the embedding and the hidden layers, number of hidden layers


class HyperNetwork(nn.Module):
    """Maps the embedding v of a client to alpha: for each layer one weight per client; the weights sum to 1."""

    def __init__(self, client: int, layers: int, clients: int, generator: torch.Generator) -> None:
        super().__init__()
        self.client = client
        self.embedding = nn.Parameter(torch.randn(WIDTH, generator=generator))
        # He initialization: activations stay of order one through the ReLU layers, so that a step changes the scores
        self.hidden = nn.Parameter(torch.randn(DEPTH, WIDTH, WIDTH, generator=generator) * (2 / WIDTH) ** 0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(DEPTH, WIDTH))
        # initial scores are about 1, the bias, so that the initial alpha is near 1 / N
        self.weight = nn.Parameter((torch.rand(layers, clients, WIDTH, generator=generator) * 2 - 1) / WIDTH)
        self.bias = nn.Parameter(torch.ones(layers, clients))

    def scores(self) -> Tensor:
        """(layers, clients): alpha before it is normalized."""
        x: Tensor = self.embedding
        for weight, bias in zip(self.hidden, self.hidden_bias, strict=True):
            x = (weight @ x + bias).relu()
        return (self.weight @ x + self.bias).relu()

    def forward(self) -> Tensor:
        """alpha (layers, clients). If all scores of a layer are zero, the client keeps its own layer."""
        scores = self.scores()
        total = scores.sum(1, keepdim=True)
        own = torch.zeros_like(scores)
        own[:, self.client] = 1
        return torch.where(total > 0, scores / total.where(total > 0, 1.0), own)


def size(layers: int, clients: int) -> int:
    """Number of bytes of a hypernetwork."""
    return 4 * (WIDTH + DEPTH * (WIDTH + 1) * WIDTH + layers * (WIDTH + 1) * clients)

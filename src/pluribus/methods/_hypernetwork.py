"""A hypernetwork, as pFedLA trains one for each client: it gives the weights with which layers are mixed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, DEPTH = 100, 3  # of its embedding and hidden layers, and how many of these


class HyperNetwork(nn.Module):
    """From a client's embedding v to alpha: for each layer of its model a weight for each client, summing to 1."""

    def __init__(self, client: int, layers: int, clients: int, generator: torch.Generator) -> None:
        super().__init__()
        self.client = client
        self.embedding = nn.Parameter(torch.randn(WIDTH, generator=generator))
        # He's scale: numbers stay of order one through all layers with ReLU, so that a step can reach the scores
        self.hidden = nn.Parameter(torch.randn(DEPTH, WIDTH, WIDTH, generator=generator) * (2 / WIDTH) ** 0.5)
        self.hidden_bias = nn.Parameter(torch.zeros(DEPTH, WIDTH))
        # scores begin at about 1, the bias: alpha begins near 1 / N
        self.weight = nn.Parameter((torch.rand(layers, clients, WIDTH, generator=generator) * 2 - 1) / WIDTH)
        self.bias = nn.Parameter(torch.ones(layers, clients))

    def scores(self) -> Tensor:
        """(layers, clients): what alpha is in proportion to."""
        x: Tensor = self.embedding
        for weight, bias in zip(self.hidden, self.hidden_bias, strict=True):
            x = (weight @ x + bias).relu()
        return (self.weight @ x + self.bias).relu()

    def forward(self) -> Tensor:
        """alpha (layers, clients). A layer without any weight is the client's own."""
        scores = self.scores()
        total = scores.sum(1, keepdim=True)
        own = torch.zeros_like(scores)
        own[:, self.client] = 1
        return torch.where(total > 0, scores / total.where(total > 0, 1.0), own)


def size(layers: int, clients: int) -> int:
    """Bytes of a hypernetwork."""
    return 4 * (WIDTH + DEPTH * (WIDTH + 1) * WIDTH + layers * (WIDTH + 1) * clients)

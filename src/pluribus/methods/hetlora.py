"""HetLoRA (Cho et al., EMNLP 2024): clients truncate global adapters to their rank, and prune ranks that they do not
need. The server pads what they send with zeros, and weights it by the norm of its product."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.message import Dim, Field, Message, Wire
from pluribus.method import register
from pluribus.methods._adapters import (
    A,
    AdapterMethod,
    B,
    Tensors,
    copy_parts,
    factors_in,
    fields_of,
    paths_of,
    rank_of,
    trained_parts,
)
from pluribus.models import TwoPartModel
from pluribus.models.adapters import adapters_of
from pluribus.ops import client_weights, weighted_mean
from pluribus.server import Server
from pluribus.settings import setting


def truncate(parts: Tensors, rank: int) -> dict[str, Tensor]:
    """The first ranks of all factors; other parts as they are."""
    return {n: p[:rank] if n.startswith(A) else p[:, :rank] if n.startswith(B) else p for n, p in parts.items()}


def pad(parts: Tensors, rank: int) -> dict[str, Tensor]:
    """The same factors with zeros up to a rank; other parts as they are."""
    found = dict(parts)
    for name, part in parts.items():
        if name.startswith(A):
            found[name] = F.pad(part, (0, 0, 0, rank - part.shape[0]))
        elif name.startswith(B):
            found[name] = F.pad(part, (0, rank - part.shape[1]))
    return found


def product_norm(parts: Tensors) -> float:
    """The Frobenius norm of B A over all layers together."""
    factors = [factors_in(parts, path) for path in paths_of(parts)]
    return math.sqrt(math.fsum(float(one.product().square().sum()) for one in factors))


@register("hetlora")
@dataclass(frozen=True)
class HetLoRA(AdapterMethod):
    """Average zero-padded adapters of different rank by the norm of their product, with ranks that clients prune."""

    paper = "Cho et al., EMNLP 2024"
    up = "adapters and head"
    down = "the first ranks of the global adapters, and the global head"
    defends_itself = True  # adapters can be compared once they are padded

    lora_scale: float = setting(1.0, above=0)
    """What the product of adapters is multiplied by. It is the same for all ranks, so that truncated adapters fit."""
    gamma: float = setting(0.99, above=0, at_most=1, symbol="gamma")
    """A client of rank r may prune the ranks above gamma r. 1: no rank is pruned."""
    penalty: float = setting(0.01, at_least=0, symbol="lambda")
    """Weight of the norms of the ranks above gamma r in the loss."""
    weighting: Literal["norm", "samples", "uniform"] = "norm"
    """Weights of clients in the mean: the norm of their product, their training samples, or equal."""

    def scale(self, rank: int) -> float:
        return self.lora_scale

    def wire(self, model: TwoPartModel) -> Wire:
        fields = fields_of(trained_parts(model))
        for path, adapter in adapters_of(model).items():
            (most, n), m = adapter.a.shape, len(adapter.b)
            rank = Dim("rank", most)
            fields[A + path] = Field((rank, n), kept=False, source="weights")
            fields[B + path] = Field((m, rank), kept=False, source="weights")
        return Wire(down=fields, up=fields)

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        super().prepare(client)
        rank = rank_of(client.card)
        client.state.rank = torch.tensor(rank, dtype=torch.int32)
        client.state.tail = torch.zeros(rank)
        self._use_ranks(client, rank)

    def _use_ranks(self, client: Client, rank: int) -> None:
        """Use the first ranks alone, the last of which are the tail, above gamma r."""
        number = torch.arange(len(client.state.tail))
        client.state.rank.fill_(rank)
        client.state.tail = ((number >= self._pruned(rank)) & (number < rank)).float()
        for adapter in adapters_of(client.model).values():
            adapter.gain.copy_((number < rank) * self.lora_scale)

    def _pruned(self, rank: int) -> int:
        """The rank after pruning. One rank always stays."""
        return max(int(self.gamma * rank), 1)

    def install(self, client: Client, down: Message) -> None:
        rank = len(down.tensor(A + next(iter(adapters_of(client.model)))))
        padded = Message(pad(down.part(), rank_of(client.card)))
        copy_parts(trained_parts(client.model), padded)
        self._use_ranks(client, rank)

    def train(self, client: Client) -> None:
        before = self._tail_norm(client).detach()
        super().train(client)
        if bool(self._tail_norm(client) < before):
            self._use_ranks(client, self._pruned(int(client.state.rank)))

    def loss(self, client: Client, batch: Batch) -> Tensor:
        return super().loss(client, batch) + self.penalty * self._tail_norm(client)

    def _tail_norm(self, client: Client) -> Tensor:
        """|B| |A| of the tail, summed over layers."""
        tail, total = client.state.tail, torch.zeros((), device=client.device)
        for adapter in adapters_of(client.model).values():
            b, a = adapter.b * tail, adapter.a * tail[:, None]
            total = total + torch.linalg.vector_norm(b) * torch.linalg.vector_norm(a)
        return total

    def report(self, client: Client) -> Tensors:
        return truncate(trained_parts(client.model), int(client.state.rank))

    # ---- server ----------------------------------------------------------------------------------------------------

    def allocate(self, server: Server, model: TwoPartModel) -> None:
        server.state.shared = {name: part.detach() for name, part in trained_parts(model).items()}
        server.state.ranks = torch.zeros(server.task.clients, dtype=torch.int32)  # 0: that of the card

    def send(self, server: Server, client: int) -> Tensors:
        rank = int(server.state.ranks[client]) or rank_of(server.cards[client])
        return truncate(server.state.shared, rank)

    def merge(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state = server.state
        first = next(name for name in state.shared if name.startswith(A))
        largest = len(state.shared[first])
        padded = server.defend({k: pad(upload.part(), largest) for k, upload in uploads.items()}, state.shared)
        state.shared = weighted_mean(padded, self._weights(server, padded))
        for k, upload in uploads.items():
            state.ranks[k] = len(upload.tensor(first))

    def _weights(self, server: Server, parts: Mapping[int, Tensors]) -> Mapping[int, float]:
        if self.weighting != "norm":
            return client_weights(server, parts, self.weighting)
        norms = {k: product_norm(one) for k, one in parts.items()}
        return norms if any(norms.values()) else dict.fromkeys(norms, 1.0)  # adapters that never moved

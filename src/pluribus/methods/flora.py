"""FLoRA (Wang et al., NeurIPS 2024): the server stacks adapters of different rank, which gives the exact sum of their
products. Clients add it to the backbone and start again from new adapters."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.message import Dim, Field, Message, Wire
from pluribus.method import Sizes, Traffic, register
from pluribus.methods._adapters import (
    A,
    AdapterMethod,
    B,
    Factors,
    copy_parts,
    draw_adapters,
    factors_in,
    fields_of,
    parts_beside,
    rank_of,
    trained_parts,
)
from pluribus.models import TwoPartModel
from pluribus.models.adapters import adapters_of, parameters_beside
from pluribus.ops import Weighting, client_weights, weighted_mean
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Task

SUM = "sum."  # of all products so far, followed by the path of a layer


def stack(adapters: Mapping[int, Factors], shares: Mapping[int, float]) -> Factors:
    """The factors of all clients side by side: their product is the sum of all products, each times its share."""
    b = torch.cat([one.b for one in adapters.values()], 1)
    return Factors(b, torch.cat([one.a * shares[k] for k, one in adapters.items()]))


def most_stacked(m: int, n: int) -> int:
    """The largest rank r with r (m + n) < m n: a stack of more takes as many bytes as its product."""
    return (m * n - 1) // (m + n)


@register("flora")
@dataclass(frozen=True)
class FLoRA(AdapterMethod):
    """Stack adapters of different rank, and add their product to the frozen backbone."""

    paper = "Wang et al., NeurIPS 2024"
    up = "adapters and head"
    down = "stacked adapters and the mean head"
    defenses = ()  # every client draws adapters of its own, so that their numbers cannot be compared

    lora_alpha: float = setting(8.0, above=0, symbol="alpha")
    """The product of adapters of rank r is multiplied by alpha / r."""
    weighting: Weighting = setting("samples", symbol="p_k")
    """Weights of clients in the sum: their training samples, or equal."""

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        """Down, at most the sums: a stack is sent only if it is smaller."""
        bound = super().traffic(task, card, sizes)
        if self.alone:
            return bound
        model = self.skeleton(task, card)
        sums = sum(adapter.base.weight.nbytes for adapter in adapters_of(model).values())
        return Traffic(bound.up, sums + sum(p.nbytes for p in parameters_beside(model).values()) + 4)

    def scale(self, rank: int) -> float:
        return self.lora_alpha / rank

    def folds(self) -> bool:
        return True

    def wire(self, model: TwoPartModel) -> Wire:
        down = fields_of(parameters_beside(model)) | {"version": Field((), torch.int32, kept=False)}
        for path, adapter in adapters_of(model).items():
            m, n = adapter.base.weight.shape
            down[SUM + path] = Field((m, n), kept=False, optional=True)
            stacked = Dim(f"{path} stacked rank", most_stacked(m, n))
            down[A + path] = Field((stacked, n), kept=False, optional=True)
            down[B + path] = Field((m, stacked), kept=False, optional=True)
        return Wire(down=down, up=fields_of(trained_parts(model)))

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        super().prepare(client)
        client.state.version = torch.tensor(-1, dtype=torch.int32)

    def install(self, client: Client, down: Message) -> None:
        copy_parts(parameters_beside(client.model), down)
        if int(client.state.version) != int(down.tensor("version")):  # a repeated download changes nothing
            self._fold(client, down)
            client.state.version = down.tensor("version")
        for adapter in adapters_of(client.model).values():
            adapter.b.data.zero_()  # its product is part of the sum

    def _fold(self, client: Client, down: Message) -> None:
        """W + the sum of all products so far: sent as such, or as the stack by which it has grown."""
        for path, adapter in adapters_of(client.model).items():
            assert adapter.folded is not None
            if SUM + path in down:
                adapter.folded.copy_(down.tensor(SUM + path))
            elif A + path in down:
                grown = factors_in(down.part(), path).product()
                adapter.folded += grown.to(adapter.folded)

    def train(self, client: Client) -> None:
        if not self.alone:
            draw_adapters(client.model, client.draw("adapters"))
        super().train(client)

    # ---- server ----------------------------------------------------------------------------------------------------

    def allocate(self, server: Server, model: TwoPartModel) -> None:
        state, layers = server.state, {path: one.base.weight.shape for path, one in adapters_of(model).items()}
        state.beside = {name: p.detach() for name, p in parameters_beside(model).items()}
        state.sums = {path: torch.zeros(m, n) for path, (m, n) in layers.items()}
        state.last = _room(layers)  # the stack of the last round
        state.rank = torch.tensor(0, dtype=torch.int32)  # of the stack: the sum of all ranks
        state.version = torch.tensor(0, dtype=torch.int32)
        state.answered = torch.zeros(server.task.clients, dtype=torch.bool)

    def send(self, server: Server, client: int) -> Mapping[str, Tensor]:
        state = server.state
        sent = {**state.beside, "version": state.version}
        if int(state.version) == 0:
            return sent
        for path, total in state.sums.items():
            a, b, rank = state.last[A + path], state.last[B + path], int(state.rank)
            # a client that took part in the last round needs what was added since, if that is smaller than the sum
            if state.answered[client] and rank <= len(a):
                sent |= {A + path: a[:rank], B + path: b[:, :rank]}
            else:
                sent[SUM + path] = total
        return sent

    def merge(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, weights = server.state, client_weights(server, uploads, self.weighting)
        total = sum(weights.values())
        shares = {k: weights[k] / total * self.scale(rank_of(server.cards[k])) for k in uploads}  # p_k alpha / r_k
        for path, summed in state.sums.items():
            stacked = stack({k: factors_in(upload.part(), path) for k, upload in uploads.items()}, shares)
            summed += stacked.product().float()
            a, b, rank = state.last[A + path], state.last[B + path], len(stacked.a)
            if rank <= len(a):
                a[:rank], b[:, :rank] = stacked.a, stacked.b
            state.rank.fill_(rank)
        state.beside = weighted_mean({k: parts_beside(upload.part()) for k, upload in uploads.items()}, weights)
        state.version += 1
        state.answered.zero_()
        state.answered[list(uploads)] = True


def _room(layers: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Room for a stack of every layer."""
    room: dict[str, Tensor] = {}
    for path, (m, n) in layers.items():
        most = most_stacked(m, n)
        room |= {A + path: torch.zeros(most, n), B + path: torch.zeros(m, most)}
    return room

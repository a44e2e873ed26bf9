"""FlexLoRA (Bai et al., NeurIPS 2024): the server averages the products of adapters, and hands out the first components
of a singular value decomposition, as many as the client's rank."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.message import Message, Wire
from pluribus.method import register
from pluribus.methods._adapters import (
    A,
    AdapterMethod,
    B,
    Factors,
    Tensors,
    copy_parts,
    factors_in,
    factors_of,
    fields_of,
    parts_beside,
    paths_of,
    rank_of,
    trained_parts,
)
from pluribus.models import TwoPartModel
from pluribus.models.adapters import parameters_beside
from pluribus.ops import Weighting, client_weights, weighted_mean
from pluribus.server import Server
from pluribus.settings import setting

PRODUCT = "BA."  # prefix of the name of a product, followed by the path of its layer


def products(parts: Tensors, scale: float) -> dict[str, Tensor]:
    """The scaled product of each adapter, and all other parts as they are."""
    found = {PRODUCT + path: (factors_in(parts, path).product() * scale).float() for path in paths_of(parts)}
    return {**found, **parts_beside(parts)}


def decompose(matrix: Tensor, rank: int) -> Factors:
    """B = U Sigma and A = V^T of the first components of a matrix, computed on the CPU in double precision.

    Signs are fixed: the entry of U with the largest magnitude in its column is positive.
    """
    if not bool(matrix.isfinite().all()):  # LAPACK has no answer; without the liar, uploads are merged again
        m, n = matrix.shape
        return Factors(torch.full((m, rank), torch.nan), torch.full((rank, n), torch.nan))
    u, s, v = torch.linalg.svd(matrix.double().cpu(), full_matrices=False)
    largest = u.gather(0, u.abs().argmax(0, keepdim=True)).flatten()
    sign = torch.where(largest < 0, -1.0, 1.0).double()
    return Factors((u * s * sign)[:, :rank].float(), (v * sign[:, None])[:rank].float())


@register("flexlora")
@dataclass(frozen=True)
class FlexLoRA(AdapterMethod):
    """Average the products of adapters, and hand out the first components of their mean."""

    paper = "Bai et al., NeurIPS 2024"
    up = "adapters and head"
    down = "first components of the mean product, and the mean head"
    defends_itself = True  # products can be compared, adapters of different rank cannot

    lora_alpha: float = setting(8.0, above=0, symbol="alpha")
    """The product of adapters of rank r is multiplied by alpha / r."""
    weighting: Weighting = setting("samples", symbol="p_k")
    """Weights of clients in the mean: their training samples, or equal."""

    def scale(self, rank: int) -> float:
        return self.lora_alpha / rank

    def wire(self, model: TwoPartModel) -> Wire:
        parts = fields_of(trained_parts(model))
        return Wire(down=parts, up=parts)

    def install(self, client: Client, down: Message) -> None:
        copy_parts(trained_parts(client.model), down)

    def allocate(self, server: Server, model: TwoPartModel) -> None:
        server.state.beside = {name: p.detach() for name, p in parameters_beside(model).items()}
        server.state.factors = {name: part.detach() for name, part in factors_of(model).items()}  # unscaled

    def send(self, server: Server, client: int) -> Tensors:
        state, rank = server.state, rank_of(server.cards[client])
        sent = dict(state.beside)
        for path in paths_of(state.factors):
            sent[A + path] = state.factors[A + path][:rank]
            sent[B + path] = state.factors[B + path][:, :rank] / self.scale(rank)  # the client multiplies by it
        return sent

    def merge(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, ranks = server.state, {k: rank_of(server.cards[k]) for k in uploads}
        sent = {k: products(upload.part(), self.scale(ranks[k])) for k, upload in uploads.items()}
        reported = server.defend(sent, products({**state.factors, **state.beside}, 1.0))
        mean = weighted_mean(reported, client_weights(server, reported, self.weighting))
        for path in paths_of(state.factors):
            b, a = decompose(mean.pop(PRODUCT + path), len(state.factors[A + path]))
            state.factors[A + path], state.factors[B + path] = a, b
        state.beside = mean

"""FD (Jeong et al., 2018), also known as FedDistill: clients share the mean output of each class and learn from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Client
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods._class_logits import ClassLogits
from pluribus.ops import row_means
from pluribus.server import Server
from pluribus.settings import setting


@register("fd")
@dataclass(frozen=True)
class FD(ClassLogits):
    """FedDistill: cross-entropy to everyone's mean logit of a sample's class; needs only common labels."""

    paper = "Jeong et al., NeurIPS workshop 2018"

    gamma: float = setting(1.0, at_least=0, symbol="gamma")
    """Weight of the distillation loss."""
    exclude_self: bool = False
    """Leave a client's own report out of what it learns from. The server then keeps every client's last report."""

    average: Literal["logits", "probabilities"] = "logits"
    """What is averaged over samples and clients: logits, whose softmax is learnt, or their softmax, as in the paper."""

    def output(self, logits: Tensor) -> Tensor:
        return logits if self.average == "logits" else logits.softmax(1)

    def distillation(self, client: Client, logits: Tensor, y: Tensor) -> Tensor:
        target = client.got.rows("logits")
        wanted = target.value[y].softmax(1) if self.average == "logits" else target.value[y]
        apart = F.cross_entropy(logits, wanted, reduction="none")
        return self.gamma * (apart * target.held[y]).mean()  # a class without a target adds nothing

    def setup(self, server: Server) -> None:
        super().setup(server)
        if self.exclude_self:  # what of the sums above is whose
            server.state.own = torch.zeros(server.task.clients, *server.state.sums.shape)
            server.state.mine = torch.zeros(server.task.clients, server.task.classes)

    def download(self, server: Server, client: int) -> Message:
        state = server.state
        if not self.exclude_self:
            return super().download(server, client)
        return Message({"logits": row_means(state.sums - state.own[client], state.reports - state.mine[client])})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        if not self.exclude_self:
            return
        state, sent = server.state, {k: upload.rows("logits") for k, upload in uploads.items()}
        renewed = torch.stack([rows.held for rows in sent.values()]).any(0)
        state.own[:, renewed], state.mine[:, renewed] = 0, 0
        for k, rows in sent.items():
            state.own[k, rows.held], state.mine[k, rows.held] = rows.value[rows.held], 1

"""FD (Jeong et al., 2018), also known as FedDistill: clients share and learn the mean output of each class."""

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
    """FedDistill: distillation from the mean logit of a sample's class over clients; needs only common labels."""

    paper = "Jeong et al., NeurIPS workshop 2018"

    gamma: float = setting(1.0, at_least=0, symbol="gamma")
    """Weight of the distillation loss."""
    exclude_self: bool = False
    """Exclude a client's own report from its target. The server then keeps the last report of every client."""

    average: Literal["logits", "probabilities"] = "logits"
    """What to average: logits (the target is the softmax of their mean), or softmax outputs, as in the paper."""

    def output(self, logits: Tensor) -> Tensor:
        return logits if self.average == "logits" else logits.softmax(1)

    def distillation(self, client: Client, logits: Tensor, y: Tensor) -> Tensor:
        target = client.got.rows("logits")
        teacher = target.value[y].softmax(1) if self.average == "logits" else target.value[y]
        loss = F.cross_entropy(logits, teacher, reduction="none")
        return self.gamma * (loss * target.held[y]).mean()  # a class without a target adds nothing

    def setup(self, server: Server) -> None:
        super().setup(server)
        if self.exclude_self:  # each client's part of the sums and reports
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
        reported = torch.stack([rows.held for rows in sent.values()]).any(0)
        state.own[:, reported], state.mine[:, reported] = 0, 0
        for k, rows in sent.items():
            state.own[k, rows.held], state.mine[k, rows.held] = rows.value[rows.held], 1

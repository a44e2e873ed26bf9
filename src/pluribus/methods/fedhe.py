"""FedHe (Chan and Ngai, 2021): mean logits per class as in FD, learned by squared error; clients take turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods._class_logits import ClassLogits
from pluribus.ops import distance_to_rows, row_means
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Task

VOTES = 10  # uploads per client after which all earlier uploads count as one report


@register("fedhe")
@dataclass(frozen=True)
class FedHe(ClassLogits):
    """Squared error to the mean logit of a sample's class over clients; sync or async; needs only common labels."""

    paper = "Chan and Ngai, MSN 2021"

    pull: float = setting(0.5, at_least=0, symbol="alpha")
    """Weight of the distance to the global logits."""
    mode: Literal["sync", "async"] = "sync"
    """Synchronous: all sampled clients train in a round. Asynchronous: a round is a few batches of one client."""
    turn_batches: int = setting(3, at_least=1)
    """Batches per turn, in asynchronous mode."""

    def participants(self, task: Task, t: int) -> Sequence[int] | None:
        if self.mode == "sync":
            return None
        return [int(torch.randint(task.clients, (), generator=task.draw("turn", t)))]

    def train(self, client: Client) -> None:
        client.fit(self.step, steps=None if self.mode == "sync" else self.turn_batches)

    def distillation(self, client: Client, logits: Tensor, y: Tensor) -> Tensor:
        return self.pull * distance_to_rows(logits, client.got.rows("logits"), y)

    def setup(self, server: Server) -> None:
        super().setup(server)
        server.state.uploads = torch.zeros((), dtype=torch.int64)

    def download(self, server: Server, client: int) -> Message:
        state = server.state
        if self.mode == "async" and state.uploads < server.task.clients:  # too few reports to learn from
            return Message({"logits": row_means(torch.zeros_like(state.sums), torch.zeros_like(state.reports))})
        return super().download(server, client)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        if self.mode == "sync":
            super().aggregate(server, uploads)
            return
        state = server.state
        for upload in uploads.values():  # a running mean, which is regularly reduced to one report
            sent = upload.rows("logits")
            state.sums += sent.value
            state.reports += sent.held
            state.uploads += 1
            if state.uploads % (VOTES * server.task.clients) == 0:
                state.sums = state.sums / state.reports.clamp(min=1)[:, None]
                state.reports = state.reports.clamp(max=1)

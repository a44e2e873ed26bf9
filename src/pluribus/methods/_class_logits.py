"""The base of FD and FedHe."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.message import Field, Message, Wire
from pluribus.method import Method
from pluribus.ops import Tally, row_means
from pluribus.server import Server
from pluribus.task import Card, Task


class ClassLogits(Method):
    """Clients upload mean logits per class, and download their mean over clients.

    The server keeps the sum and the number of reports per class. A class has a global logit once a client reports it.
    """

    family = "knowledge"
    up = "mean logit of each held class"
    down = "global logit of each known class"

    def distillation(self, client: Client, logits: Tensor, y: Tensor) -> Tensor:
        """The weighted loss term of the global logits."""
        raise NotImplementedError

    def output(self, logits: Tensor) -> Tensor:
        """The vector of a sample that is averaged. Default: its logits."""
        return logits

    def schema(self, task: Task, card: Card) -> Wire:
        logits = {"logits": Field((task.classes, task.classes), form="rows", source="class sums")}
        return Wire(down=logits, up=logits)

    def prepare(self, client: Client) -> None:
        client.state.seen = Tally(client.task.classes, client.task.classes)

    def local_update(self, client: Client) -> Message:
        client.state.seen.reset()
        self.train(client)
        return Message({"logits": client.state.seen.means()})

    def train(self, client: Client) -> None:
        """Train locally for one round."""
        client.fit(self.step)

    def loss(self, client: Client, batch: Batch) -> Tensor:
        logits = client.model(batch.x)
        client.state.seen.add(batch.y, self.output(logits))  # of the model before the step, in train mode
        return client.task_loss(logits, batch.y) + self.distillation(client, logits, batch.y)

    def setup(self, server: Server) -> None:
        server.state.sums = torch.zeros(server.task.classes, server.task.classes)
        server.state.reports = torch.zeros(server.task.classes)

    def download(self, server: Server, client: int) -> Message:
        return Message({"logits": row_means(server.state.sums, server.state.reports)})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Average over the clients that report a class. A class without a report keeps its last global logit."""
        state, sent = server.state, [upload.rows("logits") for upload in uploads.values()]
        reports = torch.stack([rows.held for rows in sent]).sum(0).float()
        state.sums = torch.where(reports[:, None] > 0, torch.stack([rows.value for rows in sent]).sum(0), state.sums)
        state.reports = torch.where(reports > 0, reports, state.reports)

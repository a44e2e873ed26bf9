"""KT-pFL (Zhang et al., NeurIPS 2021): each client learns its own mix of all clients' soft predictions on public data.
The server learns the weights of the mixes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.errors import ConflictError, MismatchError
from pluribus.message import Field, Message, Wire
from pluribus.method import Exchange, register
from pluribus.methods._public import OnPublicRows, alignment
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task

MOST_CLIENTS = 500  # the server keeps a coefficient for every pair of clients
LEAST = torch.finfo(torch.float32).tiny  # the logarithm of 0 is not finite


@register("kt-pfl")
@dataclass(frozen=True)
class KTpFL(OnPublicRows):
    """Clients train on their own data, then learn a personal mix of all predictions on public data."""

    paper = "Zhang et al., NeurIPS 2021"
    up = "soft predictions on this round's public samples"
    down = "the client's own mix of them"
    defenses = ("clip", "krum")  # the server compares single clients
    exchanges = (Exchange(None, "train_and_show", "mix"), Exchange("teacher", "transfer", None))

    temperature: float = setting(1.0, above=0, symbol="T")
    """Temperature of soft predictions."""
    transfer_epochs: int = setting(1, at_least=0, symbol="R")
    """Epochs of training on the mix of predictions."""
    transfer_weight: float = setting(1.0, at_least=0, symbol="lambda")
    """Weight of the distillation loss, for clients and for the coefficients."""
    coefficient_lr: float = setting(0.1, at_least=0, symbol="eta_3")
    """Learning rate of the knowledge coefficients. 0: they stay equal."""
    uniformity: float = setting(0.7, at_least=0, symbol="rho")
    """Weight of the squared distance of the coefficients from 1/N."""

    def check(self, task: Task, cards: Cards) -> None:
        super().check(task, cards)
        if task.clients > MOST_CLIENTS:
            raise MismatchError(
                f"kt-pfl learns a coefficient for every pair of clients, so it takes at most {MOST_CLIENTS} clients, "
                f"not {task.clients}. Use fewer --clients, or fedmd, which gives all clients the same mean."
            )
        if 2 * self.coefficient_lr * self.uniformity > 1:
            raise ConflictError(
                f"--coefficient-lr {self.coefficient_lr} times --uniformity {self.uniformity} is above 0.5, so each "
                f"step would jump over 1/N. Use smaller ones, whose product is at most 0.5."
            )

    def schema(self, task: Task, card: Card) -> tuple[Wire, Wire]:
        soft = {"soft": Field((self.aligned(task), task.classes), least=0, most=1, source="public")}
        return Wire(up=soft), Wire(down=soft)

    # ---- client ----------------------------------------------------------------------------------------------------

    def optimizers(self, client: Client) -> dict[str, Opt]:
        """One for labels and one for soft predictions, because their gradients differ in size."""
        return {"model": Opt(client.model), "transfer": Opt(client.model)}

    def train_and_show(self, client: Client) -> Message:
        """Local training on private data (Eq. 5), then s(w_n, x) for the public samples."""
        client.fit(self.step)
        return Message({"soft": client.sweep(self.soft, alignment(client, self.align))})

    def soft(self, client: Client, x: Tensor) -> Tensor:
        logits: Tensor = client.model(x)
        return (logits / self.temperature).softmax(1)

    def transfer(self, client: Client) -> Message:
        shown = alignment(client, self.align)
        # the mix is of images without augmentation
        client.fit(self.distil, shown, opts=("transfer",), epochs=self.transfer_epochs, augment=False)
        return Message({})

    def distil(self, client: Client, batch: Batch) -> Tensor:
        """lambda KL(sum_m c_nm s_m || s_n) (Eq. 6), mean over rows. A client without a mix learns nothing."""
        mix = client.got.tensor("soft")[batch.i]
        own: Tensor = (client.model(batch.x) / self.temperature).log_softmax(1)
        return self.transfer_weight * (torch.xlogy(mix, mix) - mix * own).sum(1).mean()

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        task = server.task
        server.state.c = torch.full((task.clients, task.clients), 1 / task.clients)
        server.state.mixes = torch.zeros(task.clients, self.aligned(task), task.classes)

    def mix(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Update c between the clients that answered, then mix their predictions with it."""
        state, clients = server.state, list(uploads)
        s = torch.stack([upload.tensor("soft") for upload in uploads.values()])
        pairs = torch.tensor(clients)[:, None], torch.tensor(clients)
        samples = torch.tensor([float(server.cards[k].samples) for k in clients])
        state.c[pairs] = self.updated(state.c[pairs], s, samples / samples.sum())
        state.mixes.zero_()
        state.mixes[clients] = mixed(state.c[pairs], s)
        server.notes["own_coefficient"] = {str(k): float(state.c[k, k]) for k in clients}

    def updated(self, c: Tensor, s: Tensor, share: Tensor) -> Tensor:
        """One step of gradient descent on c (Eq. 7). Each row keeps its sum, and no coefficient becomes negative.

        The gradient of KL(t_n || s_n) for c_nm is sum_k s_m (ln t_n - ln s_n) + 1, mean over rows, and that of the
        distance is 2 rho (c_nm - 1/N). The constants 1 and 1/N are the same in a whole row: the projection drops them.
        """
        logs = mixed(c, s).clamp(min=LEAST).log() - s.clamp(min=LEAST).log()
        gradient = share[:, None] * (logs.flatten(1) @ s.flatten(1).T) / s.shape[1]
        slope = self.transfer_weight * gradient + 2 * self.uniformity * c
        return projected(c - self.coefficient_lr * slope, c.sum(1))

    def teacher(self, server: Server, client: int) -> Message:
        return Message({"soft": server.state.mixes[client].clamp(max=1)})  # a sum may round to more than 1


def mixed(c: Tensor, s: Tensor) -> Tensor:
    """t_n = sum_m c_nm s_m, with coefficients that sum to 1 over these clients; equal ones if all are 0."""
    total = c.sum(1, keepdim=True)
    weights = torch.where(total > 0, c / total.where(total > 0, 1.0), 1 / len(s))
    return (weights @ s.flatten(1)).view_as(s)


def projected(rows: Tensor, sums: Tensor) -> Tensor:
    """The nearest rows without negative numbers that have these sums: max(x - tau, 0), with tau from the sorted row.

    >>> projected(torch.tensor([[0.75, 0.5, -0.25]]), torch.tensor([1.0])).tolist()
    [[0.625, 0.375, 0.0]]
    """
    rows = rows - rows.amax(1, keepdim=True)  # changes nothing but rounding
    falling = rows.sort(1, descending=True).values
    taus = (falling.cumsum(1) - sums[:, None]) / torch.arange(1, rows.shape[1] + 1)
    kept = (falling >= taus).sum(1, keepdim=True)
    return (rows - taus.gather(1, kept - 1)).clamp(min=0)

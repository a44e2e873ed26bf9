"""FedMD (Li and Wang, 2019): clients of any architecture average their logits on public data, and learn the mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client, Data
from pluribus.errors import MismatchError, PartitionError
from pluribus.message import Field, Message, Wire
from pluribus.method import Exchange, Method, Need, register
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task


@register("fedmd")
@dataclass(frozen=True)
class FedMD(Method):
    """Clients learn the mean of all logits on public data, then train on their own data."""

    paper = "Li and Wang, NeurIPS workshop 2019"
    up = "logits on this round's public samples"
    down = "their mean over clients"
    needs = frozenset({Need.PUBLIC_DATA})
    enrols = True
    exchanges = (Exchange(None, "show", "agree"), Exchange("consensus", "digest_and_revisit", None))
    defaults = MappingProxyType({"public_fraction": 0.1})

    align: int = setting(64, at_least=1, symbol="N_a")
    """Public samples for the exchange of logits, drawn again in every round."""
    digest_epochs: int = setting(1, at_least=0, symbol="E_d")
    """Epochs of training on the mean logits."""
    digest_steps: int | None = setting(None, at_least=0)
    """Steps of training on the mean logits. Default: E_d epochs."""
    revisit_steps: int | None = setting(None, at_least=0)
    """Steps on private data per round. Default: --epochs."""
    pretrain_public: int = setting(20, at_least=0)
    """Epochs on the labeled public data of all clients, before a client first takes part."""
    pretrain_private: int = setting(20, at_least=0)
    """Epochs on the client's own data after that."""

    def check(self, task: Task, cards: Cards) -> None:
        if not self._alignment_size(task):
            raise PartitionError("no client has enough data for a public sample: use a larger --public-fraction.")
        if self.pretrain_public and not task.public_labels:
            raise MismatchError("the public rows have no labels to pretrain on: use --pretrain-public 0.")

    def schema(self, task: Task, card: Card) -> tuple[Wire, Wire]:
        logits = {"logits": Field((self._alignment_size(task), task.classes), source="public")}
        return Wire(up=logits), Wire(down=logits)

    def _alignment_size(self, task: Task) -> int:
        return min(self.align, sum(task.public.values()))

    # ---- client ----------------------------------------------------------------------------------------------------

    def optimizers(self, client: Client) -> dict[str, Opt]:
        """One for labels and one for logits, because their gradients differ in size. Both keep their state."""
        return {"model": Opt(client.model, life="run"), "digest": Opt(client.model, life="run")}

    def prepare(self, client: Client) -> None:
        client.data["pool"] = Data.join(client.public.values())

    def enrol(self, client: Client) -> Message:
        """Transfer learning: train on the public data first, then on the client's own."""
        client.fit(self.step, on="pool", epochs=self.pretrain_public)
        client.fit(self.step, epochs=self.pretrain_private)
        return Message({})

    def show(self, client: Client) -> Message:
        """Communicate: send the class scores of this round's public samples."""
        return Message({"logits": client.sweep(self.predict, alignment(client, self.align))})

    def digest_and_revisit(self, client: Client) -> Message:
        shown, epochs, steps = alignment(client, self.align), self.digest_epochs, self.digest_steps
        # the mean logits are of images without augmentation
        client.fit(self.digest, shown, opts=("digest",), epochs=epochs, steps=steps, augment=False)
        client.fit(self.step, steps=self.revisit_steps)
        return Message({})

    def digest(self, client: Client, batch: Batch) -> Tensor:
        return F.l1_loss(client.model(batch.x), client.got.tensor("logits")[batch.i])

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        server.state.consensus = torch.zeros(self._alignment_size(server.task), server.task.classes)

    def agree(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Aggregate: average over the clients that answered."""
        server.state.consensus = torch.stack([upload.tensor("logits") for upload in uploads.values()]).mean(0)

    def consensus(self, server: Server, client: int) -> Message:
        """Distribute: send the mean logits."""
        return Message({"logits": server.state.consensus})


def alignment(client: Client, size: int) -> Data:
    """This round's public samples, stratified by class. All clients derive them from the common seed.

    In a random order, sample r of the n samples of a class has rank (r + 1/2) / n. The samples with the lowest ranks
    are taken; on a tie, those that come first in that order.
    """
    pool = client.data["pool"]
    order = torch.randperm(len(pool), generator=client.task.draw("align", client.t)).to(client.device)
    labels = pool.labels()[order]
    by_class = labels.argsort(stable=True)
    grouped = labels[by_class]
    first, end = torch.searchsorted(grouped, grouped), torch.searchsorted(grouped, grouped, right=True)
    rank = (torch.arange(len(pool), device=client.device) - first + 0.5) / (end - first)
    lowest = rank[by_class.argsort()].argsort(stable=True)[:size]
    return pool[order[lowest]]

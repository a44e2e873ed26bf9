"""FedMD (Li and Wang, 2019): parties of any architecture agree on logits for public data, and learn towards them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client, Data
from pluribus.errors import PartitionError
from pluribus.message import Field, Message, Wire
from pluribus.method import Exchange, Method, Need, register
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task


@register("fedmd")
@dataclass(frozen=True)
class FedMD(Method):
    """Everyone learns towards the mean of all logits on public data, then goes on with its own data."""

    paper = "Li and Wang, NeurIPS workshop 2019"
    up = "logits on this round's public samples"
    down = "their mean over clients"
    needs = frozenset({Need.PUBLIC_DATA})
    enrols = True
    exchanges = (Exchange(None, "show", "agree"), Exchange("consensus", "digest_and_revisit", None))
    defaults = MappingProxyType({"public_fraction": 0.1})

    align: int = setting(64, at_least=1, symbol="N_a")
    """Public samples that logits are exchanged on, new ones in every round."""
    digest_epochs: int = setting(1, at_least=0, symbol="E_d")
    """Epochs of learning towards the mean logits."""
    digest_steps: int | None = setting(None, at_least=0)
    """So many steps towards the mean logits in place of E_d epochs."""
    revisit_steps: int | None = setting(None, at_least=0)
    """So many steps on private data per round in place of --epochs."""
    pretrain_public: int = setting(20, at_least=0)
    """Epochs on everyone's labelled public data before a client first takes part."""
    pretrain_private: int = setting(20, at_least=0)
    """Epochs on its own data after that."""

    def check(self, task: Task, cards: Cards) -> None:
        if not self._aligned(task):
            raise PartitionError("no client has enough data to give a public sample: use a larger --public-fraction.")

    def schema(self, task: Task, card: Card) -> tuple[Wire, Wire]:
        logits = {"logits": Field((self._aligned(task), task.classes))}
        return Wire(up=logits), Wire(down=logits)

    def _aligned(self, task: Task) -> int:
        return min(self.align, sum(task.public.values()))

    # ---- client ----------------------------------------------------------------------------------------------------

    def optimisers(self, client: Client) -> dict[str, Opt]:
        """One for labels and one for logits: their gradients are of different size. Both last as long as the run."""
        return {"model": Opt(client.model, life="run"), "digest": Opt(client.model, life="run")}

    def prepare(self, client: Client) -> None:
        client.data["pool"] = Data.join(client.public.values())

    def enrol(self, client: Client) -> Message:
        """Transfer learning: the public data set first, then the client's own."""
        client.fit(self.step, on="pool", epochs=self.pretrain_public)
        client.fit(self.step, epochs=self.pretrain_private)
        return Message({})

    def show(self, client: Client) -> Message:
        """Communicate: the class scores of this round's public samples."""
        return Message({"logits": client.sweep(self.predict, alignment(client, self.align))})

    def digest_and_revisit(self, client: Client) -> Message:
        shown, epochs, steps = alignment(client, self.align), self.digest_epochs, self.digest_steps
        # everyone's logits are of the images as they are
        client.fit(self.digest, shown, opts=("digest",), epochs=epochs, steps=steps, augment=False)
        client.fit(self.step, steps=self.revisit_steps)
        return Message({})

    def digest(self, client: Client, batch: Batch) -> Tensor:
        return F.l1_loss(client.model(batch.x), client.got.tensor("logits")[batch.i])

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        server.state.consensus = torch.zeros(self._aligned(server.task), server.task.classes)

    def agree(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Aggregate: the mean over whoever answered."""
        server.state.consensus = torch.stack([upload.tensor("logits") for upload in uploads.values()]).mean(0)

    def consensus(self, server: Server, client: int) -> Message:
        """Distribute."""
        return Message({"logits": server.state.consensus})


def alignment(client: Client, size: int) -> Data:
    """This round's public samples, each class by its share: everyone derives them from the common seed.

    Of n samples of a class, in a random order, the r-th has the rank (r + 1/2) / n. The lowest ranks are taken, and of
    equal ones those that come first in that order.
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

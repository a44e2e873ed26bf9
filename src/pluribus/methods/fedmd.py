"""FedMD (Li and Wang, 2019): clients of any architecture average their logits on public data, and learn the mean."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.errors import MismatchError
from pluribus.message import Message
from pluribus.method import Exchange, register
from pluribus.methods._public import MeanLogits, alignment
from pluribus.optim import Opt
from pluribus.settings import setting
from pluribus.task import Cards, Task


@register("fedmd")
@dataclass(frozen=True)
class FedMD(MeanLogits):
    """Clients learn the mean of all logits on public data, then train on their own data."""

    paper = "Li and Wang, NeurIPS workshop 2019"
    enrols = True
    exchanges = (Exchange(None, "show", "agree"), Exchange("consensus", "digest_and_revisit", None))

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
        super().check(task, cards)
        if self.pretrain_public and not task.public_labels:
            raise MismatchError("the public rows have no labels to pretrain on: use --pretrain-public 0.")

    def optimizers(self, client: Client) -> dict[str, Opt]:
        """One for labels and one for logits, because their gradients differ in size. Both keep their state."""
        return {"model": Opt(client.model, life="run"), "digest": Opt(client.model, life="run")}

    def enrol(self, client: Client) -> Message:
        """Transfer learning: train on the public data first, then on the client's own."""
        client.fit(self.step, on="pool", epochs=self.pretrain_public)
        client.fit(self.step, epochs=self.pretrain_private)
        return Message({})

    def digest_and_revisit(self, client: Client) -> Message:
        shown, epochs, steps = alignment(client, self.align), self.digest_epochs, self.digest_steps
        # the mean logits are of images without augmentation
        client.fit(self.digest, shown, opts=("digest",), epochs=epochs, steps=steps, augment=False)
        client.fit(self.step, steps=self.revisit_steps)
        return Message({})

    def digest(self, client: Client, batch: Batch) -> Tensor:
        return F.l1_loss(client.model(batch.x), client.got.tensor("logits")[batch.i])

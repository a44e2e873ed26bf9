"""Ditto (Li et al., ICML 2021): FedAvg, and beside it a personal model per client that is pulled to the global one."""

from dataclasses import dataclass

from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.message import Message, Wire, schema_of
from pluribus.method import register
from pluribus.methods.fedavg import FedAvg
from pluribus.methods.fedprox import drift
from pluribus.optim import Opt
from pluribus.settings import setting
from pluribus.task import Card, Task


@register("ditto")
@dataclass(frozen=True)
class Ditto(FedAvg):
    """Average whole models; beside them each client trains a personal model with a pull to the global one."""

    paper = "Li et al., ICML 2021"
    views = ("after", "before")  # after: the personal model v_k; before: the global model w

    pull: float = setting(1.0, at_least=0, symbol="lambda")
    """Weight of the squared distance of the personal to the global model. 0 is local training beside FedAvg."""

    def schema(self, task: Task, card: Card) -> Wire:
        model = task.shape_of(card.model)
        return Wire(down=schema_of(model, kept=True), up=schema_of(model))

    def prepare(self, client: Client) -> None:
        common = client.task.build(client.card.model, "global")
        client.model.load_state_dict(common.state_dict())  # v_k^0 = w^0
        client.state.shared = common  # w_k

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model), "shared": Opt(client.state.shared)}

    def receive(self, client: Client, down: Message) -> None:
        client.state.shared.load_state_dict(down.part())  # w_k <- w^t

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message.of(client.state.shared)  # v_k stays private

    def step(self, client: Client, batch: Batch) -> Tensor:
        """One step of both models, on the same batch."""
        shared_loss = client.task_loss(client.state.shared(batch.x), batch.y)  # F_k(w_k)
        own_loss = self.loss(client, batch)  # F_k(v_k)
        pulled = own_loss + self.pull / 2 * drift(client.model, _global_model(client))  # h_k(v_k; w^t), Eq. 1
        client.descend(shared_loss + pulled, "shared", "model")  # each term has gradients for one model only
        return own_loss

    def adapt(self, client: Client, view: str) -> None:
        client.model.load_state_dict(_global_model(client))  # in the view `before`


def _global_model(client: Client) -> dict[str, Tensor]:
    """w^t, as the client has downloaded it."""
    return {name: client.got.tensor(name) for name in client.got}

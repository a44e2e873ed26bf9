"""Per-FedAvg (Fallah et al., NeurIPS 2020): train a global model to be good after one step on a client's data."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.message import Message
from pluribus.method import register
from pluribus.methods._second_order import Parameters, gradient, hessian_product, moved, split
from pluribus.methods.fedavg import FedAvg
from pluribus.optim import Opt, Rule
from pluribus.settings import setting


@register("per-fedavg")
@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """FedAvg on the loss after one adaptation step on the client's data."""

    unbounded = "its step takes gradients at other weights and products with Hessians, not one gradient of each row."
    paper = "Fallah et al., NeurIPS 2020"
    views = ("adapted", "before")  # adapted: the global model after one step on the client's data

    inner_lr: float = setting(0.01, at_least=0, symbol="alpha")
    """Learning rate of the adaptation step. The rate beta of the outer step is --lr."""
    variant: Literal["exact", "hessian-free", "first-order"] = "exact"
    """Product of Hessian and gradient, on a third batch: exact, by a difference of gradients, or left out."""
    difference: float = setting(1e-3, above=0, symbol="delta")
    """Step size of the difference of gradients in the hessian-free variant."""

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model), "inner": Opt(client.model, Rule("sgd", self.inner_lr))}

    def local_update(self, client: Client) -> Message:
        client.fit(self.step, batch=self._parts * client.local.batch)
        return Message.of(self.part(client.model))

    @property
    def _parts(self) -> int:
        return 2 if self.variant == "first-order" else 3

    def step(self, client: Client, batch: Batch) -> Tensor:
        first, second, *third = split(batch, self._parts)
        theta = {name: p.detach() for name, p in client.parameters().items()}
        loss = self.loss(client, first)  # the client's own forward pass: it updates batch-norm statistics at theta
        adapted = moved(theta, client.grads(loss), -self.inner_lr)
        outer = gradient(client, adapted, second)
        for part in third:  # outer = (I - alpha Hessian) outer
            outer = moved(outer, self._product(client, theta, outer, part), -self.inner_lr)
        client.apply(outer)
        return loss

    def _product(self, client: Client, theta: Parameters, direction: Parameters, batch: Batch) -> dict[str, Tensor]:
        """Hessian times direction."""
        if self.variant == "exact":
            return hessian_product(client, theta, direction, batch)
        ahead = gradient(client, moved(theta, direction, self.difference), batch)
        behind = gradient(client, moved(theta, direction, -self.difference), batch)
        return {name: (ahead[name] - behind[name]) / (2 * self.difference) for name in direction}

    def adapt(self, client: Client, view: str) -> None:
        """Take one step on the first batch of the client's shuffled training data."""
        if view == "adapted":
            client.fit(self.loss, opts=("inner",), steps=1)  # theta - alpha grad f_i(theta)

"""IND and AGG, baselines of FedH2L (Li et al., 2021): clients also train on public data and send nothing."""

from dataclasses import dataclass
from types import MappingProxyType

from pluribus.client import Client, Data
from pluribus.message import Message
from pluribus.method import Method, Need, register
from pluribus.optim import Opt
from pluribus.targets import TARGETS

# The paper's Rotated MNIST settings, on embedded digits.
SETTINGS = MappingProxyType(
    {
        "data": "rotated-digits",
        "partition": "auto",  # by domain, if the data has domains
        "clients": 4,
        "val_fraction": 0.1,
        "test_fraction": 0.15,
        "public_fraction": 0.1,
        "rounds": 500,
        "batch_size": 32,
        "optimizer": "amsgrad",
        "lr": 1e-3,
        "weight_decay": 1e-4,
        "evaluate_every": 50,
    }
)


@register("ind")
@dataclass(frozen=True)
class Ind(Method):
    """Each client trains on its own private and public data; nothing is sent."""

    paper = "baseline of Li et al., 2021"
    family = "baseline"
    targets = TARGETS
    needs = frozenset({Need.PUBLIC_DATA, Need.PUBLIC_LABELS})
    defaults = SETTINGS

    def optimizers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model, life="run")}

    def prepare(self, client: Client) -> None:
        client.data["local"] = own_and_public(client, everyones=False)

    def local_update(self, client: Client) -> Message | None:
        client.fit(self.step, on="local", steps=1)
        return Message({})


@register("agg")
@dataclass(frozen=True)
class Agg(Ind):
    """Each client trains on its own data and the labeled public data of all clients; nothing is sent."""

    def prepare(self, client: Client) -> None:
        client.data["local"] = own_and_public(client, everyones=True)


def own_and_public(client: Client, everyones: bool) -> Data:
    """The client's private data, joined with its own public data or with that of all clients, if it has labels."""
    if not client.task.public_labels:
        return client.data["train"]
    public = client.public
    return Data.join([client.data["train"], *(public.values() if everyones else [public[client.card.id]])])

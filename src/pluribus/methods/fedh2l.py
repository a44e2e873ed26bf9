"""FedH2L (Li et al., 2021): peers teach each other on public seed data, and no lesson may undo what a peer knows.

There is no server. Each node takes a step on its own data, shows its posteriors on a batch of its public data, and
learns from the others' posteriors with a gradient that is projected where it conflicts with its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.data.federated import Data
from pluribus.errors import ConfigError
from pluribus.message import Dim, Field, Inbox, Message, Wire
from pluribus.method import Method, Need, PeerMethod, register
from pluribus.ops import flatten, project, unflatten
from pluribus.optim import Opt
from pluribus.task import Card, Task

# The paper's Rotated MNIST settings, on embedded digits.
SETTINGS = MappingProxyType(
    {
        "data": "rotated-digits",
        "partition": "domain",
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


@register("fedh2l")
@dataclass(frozen=True)
class FedH2L(PeerMethod):
    """Peers learn from each other's posteriors on public data, by gradients that do not conflict with their own."""

    paper = "Li et al., 2021"
    up = "posteriors on a public batch, and their accuracy"
    down = "the same of every teacher"
    needs = frozenset({Need.PUBLIC_DATA})
    defaults = SETTINGS

    labels: Literal["all", "own", "none"] = "all"
    """Whose public labels a node may use: all, its own for local steps (slightly worse), or none in lessons either."""
    every: int = 1
    """E: local steps between lessons. A round is one local step."""
    pairs: bool = False
    """Asynchronous variant: in every lesson each node learns from one random partner."""
    kl: bool = True
    """Learn from posteriors (Eq. 3); off: from public labels alone."""
    conflict: Literal["project", "ignore", "pcgrad"] = "project"
    """What happens to a lesson that conflicts with local learning: projected (Eq. 8), taken as it is, or both gradients
    projected on each other (PCGrad)."""

    def check(self, task: Task, cards: Mapping[int, Card]) -> None:
        if self.conflict == "pcgrad" and (self.every > 1 or self.pairs):
            raise ConfigError("--conflict pcgrad takes both gradients in one step: it needs --every 1 and no --pairs.")
        if not self.kl and self.labels == "none":
            raise ConfigError("without --kl and without public labels there is nothing to learn from peers.")

    def schema(self, task: Task, card: Card) -> Wire:
        batch = Dim("batch", max(len(data) for data in task.public.values()))
        return Wire(up={"posterior": Field((batch, task.classes)), "accuracy": Field(())})

    def topology(self, task: Task, t: int, present: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
        if not self.pairs:
            return super().topology(task, t, present)
        order = [present[i] for i in torch.randperm(len(present), generator=task.draw("pairs", t)).tolist()]
        couples = zip(order[::2], order[1::2], strict=False)  # with an odd number one node is idle
        return {student: (teacher,) for a, b in couples for student, teacher in ((a, b), (b, a))}

    def optimisers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model, life="run")}  # one AMSGrad for both steps of a round

    def prepare(self, client: Client) -> None:
        client.data["local"] = own_and_public(client, everyones=self.labels == "all")
        client.state.local_gradient = torch.zeros(sum(p.numel() for p in client.model.parameters()))

    # ---- first barrier: local optimisation, then the teaching signal -----------------------------------------------

    def teach(self, client: Client) -> Message | None:
        client.fit(self.local_step, on="local", steps=1)
        if (client.t + 1) % self.every:
            return None
        data = self._public_batch(client, client.card.id)
        posteriors: list[Tensor] = []
        client.sweep(lambda client, batch: posteriors.append(client.model(batch.x).softmax(1)), data)
        posterior = torch.cat(posteriors)
        accuracy = (posterior.argmax(1) == data.labels()).float().mean()
        return Message({"posterior": posterior, "accuracy": accuracy})

    def local_step(self, client: Client, batch: Batch) -> Tensor:
        loss = F.cross_entropy(client.model(batch.x), batch.y)
        grads = client.grads(loss)  # Eq. 2
        client.state.local_gradient = client.state.local_gradient + flatten(grads, client.parameters())
        if self.conflict != "pcgrad":
            client.apply(grads)
        return loss

    def _public_batch(self, client: Client, node: int) -> Data:
        """The public samples that a node teaches on this round: everyone derives them from the common seed."""
        public = client.task.public
        size = min(client.local.batch, *(len(data) for data in public.values()))
        positions = torch.randperm(len(public[node]), generator=client.task.draw("public batch", client.t, node))[:size]
        return Data(public[node].store, public[node].rows[positions.to(client.device)])

    # ---- second barrier: mutual learning ---------------------------------------------------------------------------

    def learn(self, client: Client, inbox: Inbox) -> None:
        lessons = [self._public_batch(client, teacher) for teacher in inbox.ids]
        together = Data(lessons[0].store, torch.cat([data.rows for data in lessons]))
        client.fit(self.public_step, on=together, steps=1, batch=len(together))
        client.state.local_gradient = torch.zeros_like(client.state.local_gradient)

    def public_step(self, client: Client, batch: Batch) -> None:
        assert client.inbox is not None
        posterior, accuracy = client.inbox.got["posterior"], client.inbox.got["accuracy"]
        taught = posterior.flatten(0, 1)[batch.i]
        confidence = accuracy.repeat_interleave(posterior.shape[1])[batch.i]
        logits = client.model(batch.x)
        loss = logits.new_zeros(())
        if self.kl:
            divergence = F.kl_div(logits.log_softmax(1), taught, reduction="none").sum(1)
            loss = loss + (confidence * divergence).mean()  # Eq. 3, 4
        if self.labels != "none":
            loss = loss + F.cross_entropy(logits, batch.y)  # Eq. 5
        lesson = flatten(client.grads(loss), client.parameters())  # Eq. 6
        client.apply(unflatten(self._resolved(lesson, client.state.local_gradient), client.parameters()))

    def _resolved(self, lesson: Tensor, local: Tensor) -> Tensor:
        """The gradient that is applied."""
        if self.conflict == "ignore":
            return lesson
        if self.conflict == "pcgrad":
            return project(lesson, local) + project(local, lesson)
        return project(lesson, local)  # Eq. 8


@register("ind")
@dataclass(frozen=True)
class Ind(Method):
    """Each node trains on its own private and public data; nothing travels."""

    paper = "baseline of Li et al., 2021"
    needs = frozenset({Need.PUBLIC_DATA})
    defaults = SETTINGS

    def optimisers(self, client: Client) -> dict[str, Opt]:
        return {"model": Opt(client.model, life="run")}

    def prepare(self, client: Client) -> None:
        client.data["local"] = own_and_public(client, everyones=False)

    def local_update(self, client: Client) -> Message:
        client.fit(self.step, on="local", steps=1)
        return Message({})


@register("agg")
@dataclass(frozen=True)
class Agg(Ind):
    """Each node trains on its own data and everyone's labelled public data."""

    def prepare(self, client: Client) -> None:
        client.data["local"] = own_and_public(client, everyones=True)


def own_and_public(client: Client, everyones: bool) -> Data:
    """Private data, together with the node's own public data or with everyone's."""
    train, public = client.data["train"], client.task.public
    shared = public.values() if everyones else [public[client.card.id]]
    return Data(train.store, torch.cat([train.rows, *(data.rows for data in shared)]))

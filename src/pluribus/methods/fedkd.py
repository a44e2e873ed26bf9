"""FedKD (Wu et al., Nature Communications 2022): a private mentor and a small shared mentee teach each other, and what
travels of the mentee is compressed by singular value decomposition, ever more precisely as training goes on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.message import Field, Message, Wire
from pluribus.method import Sizes, Traffic, register
from pluribus.methods import _lowrank as lowrank
from pluribus.methods._auxiliary import Auxiliary
from pluribus.ops import Weighting, client_weights, kl, weighted_mean
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Task


class Side(NamedTuple):
    """Mentor or mentee on a batch: its task loss, its features (of a mentee, as W_h maps them) and its logits."""

    task: Tensor
    features: Tensor
    logits: Tensor

    def held(self) -> "Side":
        """The same values, which nothing moves."""
        return Side(*(value.detach() for value in self))

    def taught_by(self, other: "Side") -> Tensor:
        """L: the task loss and what the other teaches, which counts the more the surer both are."""
        taught = kl(other.logits, self.logits).mean() + F.mse_loss(other.features, self.features)
        return self.task + taught / (self.task + other.task)


@register("fedkd")
@dataclass(frozen=True)
class FedKD(Auxiliary):
    """A private mentor and a small shared mentee distil into each other; the mentee travels in low-rank factors."""

    paper = "Wu et al., Nature Communications 2022"
    up = "the mentee, in low-rank factors"
    down = "the mean mentee, in low-rank factors"
    defaults = MappingProxyType({"lr": 0.05})  # on digits, 0.01 takes more than 20 rounds

    mentee_lr: float | None = setting(None, above=0)
    """Learning rate of the mentee. Unset: that of the local models."""
    losses: Literal["joint", "own"] = "joint"
    """What mentor and mentee descend: the sum of both losses, or each its own, as in the paper."""
    what: Literal["updates", "parameters"] = "updates"
    """What is compressed: how the mentee changed since it last came down, or the mentee itself."""
    energy_start: float = setting(0.95, above=0, at_most=1, symbol="T_start")
    """Share of a matrix's squared norm that its factors hold in the first round; 1 loses nothing."""
    energy_end: float = setting(0.98, above=0, at_most=1, symbol="T_end")
    """The same towards the last round."""
    weighting: Weighting = "uniform"
    """Whether a client counts by its training samples, or each client once."""

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        return {"energy": self.energy_start + t / rounds * (self.energy_end - self.energy_start)}

    def schema(self, task: Task, card: Card) -> Wire:
        fields = lowrank.fields(self.auxiliary_shape(task).state_dict())
        version = {"version": Field((), torch.int32, kept=False)} if self.what == "updates" else {}
        return Wire(down=fields | version, up=fields)

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        """The mentee as it is: factors travel only where they are smaller."""
        size = sum(value.nbytes for value in self.auxiliary_shape(task).state_dict().values())
        return Traffic(size, size + (4 if self.what == "updates" else 0))

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        super().prepare(client)
        own, mentee = client.card.width, client.state.shared
        client.state.adapter = client.make("W_h", lambda: nn.Linear(mentee.width, own, bias=False))
        if self.what == "updates":
            client.state.last = self.auxiliary(client.task).requires_grad_(False)  # as it last came down
            client.state.version = torch.tensor(-1, dtype=torch.int32)

    def optimisers(self, client: Client) -> dict[str, Opt]:
        state, rule = client.state, client.local.rule
        rule = rule if self.mentee_lr is None else replace(rule, lr=self.mentee_lr)
        return {"model": Opt(client.model), "mentee": Opt(state.shared, rule), "adapter": Opt(state.adapter)}

    def receive(self, client: Client, down: Message) -> None:
        mentee = client.state.shared.state_dict()
        if self.what == "parameters":
            client.state.shared.load_state_dict(lowrank.unpacked(down, mentee, {}))
            return
        last = client.state.last
        if int(client.state.version) != int(down.tensor("version")):  # what came twice changes nothing
            last.load_state_dict(lowrank.unpacked(down, mentee, last.state_dict()))
            client.state.version = down.tensor("version")
        client.state.shared.load_state_dict(last.state_dict())

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        since = client.state.last.state_dict() if self.what == "updates" else {}
        return Message(lowrank.packed(client.state.shared.state_dict(), float(client.now["energy"]), since))

    def step(self, client: Client, batch: Batch) -> Tensor:
        mentor, mentee = client.model, client.state.shared
        z, z_g = mentor.features(batch.x), mentee.features(batch.x)
        o, o_g = mentor.head(z), mentee.head(z_g)
        task_loss, mentee_task_loss = F.cross_entropy(o, batch.y), F.cross_entropy(o_g, batch.y)
        mapped = client.state.adapter(z_g)
        if self.losses == "own":
            one, other = Side(task_loss, z, o), Side(mentee_task_loss, mapped, o_g)
            loss, mentee_loss = one.taught_by(other.held()), other.taught_by(one.held())
        else:
            hidden = F.mse_loss(mapped, z)
            certainty = task_loss + mentee_task_loss  # D: the surer both are, the more they listen to each other
            loss = task_loss + (kl(o_g, o).mean() + hidden) / certainty
            mentee_loss = mentee_task_loss + (kl(o, o_g).mean() + hidden) / certainty
        client.descend(loss + mentee_loss, "model", "mentee", "adapter")
        return task_loss

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        super().setup(server)
        server.state.sent = lowrank.Shelf(server.state.shared.state_dict())
        server.state.version = torch.tensor(0, dtype=torch.int32)
        server.state.answered = torch.zeros(server.task.clients, dtype=torch.bool)

    def download(self, server: Server, client: int) -> Message:
        state, whole = server.state, server.state.shared.state_dict()
        if self.what == "parameters":
            return Message(state.sent.get(whole))
        # who answered last time has the version before this one, and needs what changed; others need the whole
        return Message({"version": state.version, **(state.sent.get(whole) if state.answered[client] else whole)})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, mentee = server.state, server.state.shared.state_dict()
        since = mentee if self.what == "updates" else {}
        reported = {k: lowrank.unpacked(upload, mentee, since) for k, upload in uploads.items()}
        mean = weighted_mean(reported, client_weights(server, uploads, self.weighting))
        sent = Message(lowrank.packed(mean, server.now["energy"], since))
        state.sent.put(sent.part())
        state.shared.load_state_dict(lowrank.unpacked(sent, mentee, since))  # the server has what its clients will have
        state.version += 1
        state.answered.zero_()
        state.answered[list(uploads)] = True

"""FedKD (Wu et al., Nature Communications 2022): a private mentor and a small shared mentee teach each other. The
mentee is sent in a singular value decomposition, which becomes more precise during training."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.message import Field, Message, Wire, move_together
from pluribus.method import Sizes, Traffic, register
from pluribus.methods import _lowrank as lowrank
from pluribus.methods._auxiliary import Auxiliary
from pluribus.ops import Weighting, client_weights, weighted_mean
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.targets import TARGETS, Target
from pluribus.task import Card, Task


class Side(NamedTuple):
    """Mentor or mentee on a batch: task loss, features (of the mentee, mapped by W_h) and logits."""

    task: Tensor
    features: Tensor
    logits: Tensor

    def held(self) -> "Side":
        """The same values without gradients."""
        return Side(*(value.detach() for value in self))

    def taught_by(self, other: "Side", target: Target) -> Tensor:
        """L: the task loss plus the distillation loss, whose weight grows as both task losses fall."""
        taught = target.divergence(other.logits, self.logits).mean() + F.mse_loss(other.features, self.features)
        return self.task + taught / (self.task + other.task)


@register("fedkd")
@dataclass(frozen=True)
class FedKD(Auxiliary):
    """Mutual distillation between a private mentor and a small shared mentee, sent in low-rank factors."""

    paper = "Wu et al., Nature Communications 2022"
    up = "the mentee, in low-rank factors"
    down = "the mean mentee, in low-rank factors"
    targets = TARGETS
    defends_itself = True  # factors of matrices are no coordinates
    defaults = MappingProxyType({"lr": 0.05})  # on digits, 0.01 takes more than 20 rounds

    mentee_lr: float | None = setting(None, above=0)
    """Learning rate of the mentee. Default: --lr."""
    losses: Literal["joint", "own"] = "joint"
    """Mentor and mentee minimize the sum of both losses, or each its own loss, as in the paper."""
    what: Literal["updates", "parameters"] = "updates"
    """What to compress: the change of the mentee since its last download, or the mentee itself."""
    energy_start: float = setting(0.95, above=0, at_most=1, symbol="T_start")
    """Share of a matrix's squared norm that its factors hold in the first round; 1 is lossless."""
    energy_end: float = setting(0.98, above=0, at_most=1, symbol="T_end")
    """The same share at the end of the run."""
    weighting: Weighting = "uniform"
    """Weights of clients in the mean: their training samples, or equal."""

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        return {"energy": self.energy_start + t / rounds * (self.energy_end - self.energy_start)}

    def schema(self, task: Task, card: Card) -> Wire:
        fields = lowrank.fields(self.auxiliary_shape(task).state_dict())
        version = {"version": Field((), torch.int32, kept=False)} if self.what == "updates" else {}
        return Wire(down=fields | version, up=fields)

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        """At most the whole mentee, because factors are sent only if they are smaller."""
        size = sum(value.nbytes for value in self.auxiliary_shape(task).state_dict().values())
        return Traffic(size, size + (4 if self.what == "updates" else 0))

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        super().prepare(client)
        own, mentee = client.card.width, client.state.shared
        client.state.adapter = client.make("W_h", lambda: nn.Linear(mentee.width, own, bias=False))
        if self.what == "updates":
            client.state.last = self.auxiliary(client.task).requires_grad_(False)  # the last download
            client.state.version = torch.tensor(-1, dtype=torch.int32)

    def optimizers(self, client: Client) -> dict[str, Opt]:
        state, rule = client.state, client.local.rule
        rule = rule if self.mentee_lr is None else replace(rule, lr=self.mentee_lr)
        return {"model": Opt(client.model), "mentee": Opt(state.shared, rule), "adapter": Opt(state.adapter)}

    def receive(self, client: Client, down: Message) -> None:
        mentee = client.state.shared.state_dict()
        if self.what == "parameters":
            client.state.shared.load_state_dict(lowrank.unpacked(down, mentee, {}))
            return
        last = client.state.last
        if int(client.state.version) != int(down.tensor("version")):  # a repeated download changes nothing
            restored = lowrank.unpacked(down, mentee, last.state_dict())
            last.load_state_dict(move_together(restored, client.device))
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
        task_loss, mentee_task_loss = client.task_loss(o, batch.y), client.task_loss(o_g, batch.y)
        mapped, target = client.state.adapter(z_g), client.task.target
        if self.losses == "own":
            one, other = Side(task_loss, z, o), Side(mentee_task_loss, mapped, o_g)
            loss, mentee_loss = one.taught_by(other.held(), target), other.taught_by(one.held(), target)
        else:
            hidden = F.mse_loss(mapped, z)
            certainty = task_loss + mentee_task_loss  # D: smaller losses give more weight to distillation
            loss = task_loss + (target.divergence(o_g, o).mean() + hidden) / certainty
            mentee_loss = mentee_task_loss + (target.divergence(o, o_g).mean() + hidden) / certainty
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
        # a client that answered last time has the previous version and needs the change; others need the whole mentee
        return Message({"version": state.version, **(state.sent.get(whole) if state.answered[client] else whole)})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, mentee = server.state, server.state.shared.state_dict()
        since = mentee if self.what == "updates" else {}
        sent_by = {k: lowrank.unpacked(upload, mentee, since) for k, upload in uploads.items()}
        reported = server.defend(sent_by, mentee)
        mean = weighted_mean(reported, client_weights(server, reported, self.weighting))
        sent = Message(lowrank.packed(mean, server.now["energy"], since))
        state.sent.put(sent.part())
        state.shared.load_state_dict(lowrank.unpacked(sent, mentee, since))  # the same as on clients
        state.version += 1
        state.answered.zero_()
        state.answered[list(uploads)] = True

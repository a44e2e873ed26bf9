"""DepthFL (Kim et al., ICLR 2023): clients have the first stages of one model, with an exit after each stage. The exits
of a client teach each other, and each stage and exit is averaged over the clients that have it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pluribus.client import Batch, Client
from pluribus.errors import MismatchError
from pluribus.inputs import KINDS
from pluribus.message import Field, Message, Wire
from pluribus.method import Method, Need, register
from pluribus.models import TwoPartModel
from pluribus.models.capacity import Capacity, architecture_of, name_with
from pluribus.models.depth import depth_of, exit_of, part_names, run_stages
from pluribus.ops import Weighting, client_weights, weighted_mean
from pluribus.optim import Opt
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.targets import TARGETS
from pluribus.task import Card, Cards, Task

STEEPNESS = 5.0  # of the ramp: its first weight is exp(-5)


@register("depthfl")
@dataclass(frozen=True)
class DepthFL(Method):
    """Average models of different depth, whose exits after each stage teach each other."""

    paper = "Kim et al., ICLR 2023"
    family = "sub-models"
    up = "the client's stages and exits"
    down = "the global stages and exits that it has"
    takes = tuple(kind for kind in KINDS if kind != "tokens")  # no model of texts has exits
    targets = TARGETS
    needs = frozenset({Need.SAME_ARCHITECTURE})
    capacity = "depth"
    views = ("before", "after")  # before: the global stages and exits
    defaults = MappingProxyType({"models": "cnn-16-32", "capacity": "2,1", "lr": 0.05})

    distill: float = setting(1.0, at_least=0)
    """Weight of the divergence between the exits of a client; 0: exits learn from labels alone."""
    ramp_up: int = setting(0, at_least=0)
    """Rounds in which that weight grows to its full value, from 0.7 % of it. 0: it is constant."""
    weighting: Weighting = "uniform"
    """Weights of clients in the mean of a stage or exit: equal, or their training samples."""

    def schema(self, task: Task, card: Card) -> Wire:
        model = task.shape_of(card.model)
        tensors = parts(model, _exits(task.shape_of, card.model, model)).items()
        shared = {n: Field(tuple(v.shape), v.dtype, kept=False, source="weights") for n, v in tensors}
        return Wire(down=shared, up=shared)

    def check(self, task: Task, cards: Cards) -> None:
        for card in cards.firsts():
            if card.capacity is not None and card.capacity.kind != "depth":
                raise MismatchError(
                    f"depthfl cuts the depth of models, but client {card.id} ({card.model}) has another capacity. Use "
                    f"--models {card.architecture}, and --capacity with numbers of stages."
                )
            self.schema(task, card)  # refuses models without stages

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        missing = 1 - min(t / self.ramp_up, 1.0) if self.ramp_up else 0.0
        return {"distill": self.distill * math.exp(-STEEPNESS * missing**2)}

    def prepare(self, client: Client) -> None:
        client.state.exits = _exits(client.task.build, client.card.model, client.model)

    def optimizers(self, client: Client) -> dict[str, Opt]:
        found = {"model": Opt(client.model)}
        return found | {"exits": Opt(client.state.exits)} if len(client.state.exits) else found

    def setup(self, server: Server) -> None:
        deepest = max(server.cards.firsts(), key=_depth).model  # it has all stages and exits that anybody has
        model = server.task.build(deepest, "global")
        server.state.shared = parts(model, _exits(server.task.build, deepest, model))

    def download(self, server: Server, client: int) -> Message:
        depth = _depth(server.cards[client])
        return Message({name: value for name, value in server.state.shared.items() if _number(name) <= depth})

    def receive(self, client: Client, down: Message) -> None:
        for name, value in parts(client.model, client.state.exits).items():
            value.copy_(down.tensor(name))

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message(parts(client.model, client.state.exits))

    def scores(self, client: Client, x: Tensor) -> list[Tensor]:
        """The scores of all exits, the first one's first."""
        outputs, last = run_stages(client.model, x)
        return [*(one(output) for one, output in zip(client.state.exits, outputs, strict=True)), last]

    def step(self, client: Client, batch: Batch) -> Tensor:
        scores, divergence = self.scores(client, batch.x), client.task.target.divergence  # KL, for classes
        loss = torch.stack([client.task_loss(one, batch.y) for one in scores]).sum()
        pairs = [(i, j) for i in range(len(scores)) for j in range(len(scores)) if i != j]
        if pairs:
            # every exit is a student of all others
            apart = torch.stack([divergence(scores[j].detach(), scores[i]).mean() for i, j in pairs]).sum()
            loss = loss + client.now["distill"] * apart / (len(scores) - 1)
        client.descend(loss, *client.optimizers)
        return loss

    def predict(self, client: Client, x: Tensor) -> Tensor:
        return torch.stack(self.scores(client, x)).mean(0)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        weights = client_weights(server, uploads, self.weighting)
        sent = {k: upload.part() for k, upload in uploads.items()}
        shared = server.state.shared
        for name in shared:
            if holders := {k: {name: part[name]} for k, part in sent.items() if name in part}:
                shared[name] = weighted_mean(holders, weights)[name]


def parts(model: TwoPartModel, exits: nn.ModuleList) -> dict[str, Tensor]:
    """The live tensors of a model and of the exits before its last stage, by part: `stage1.NAME`, `exit1.NAME`."""
    last = part_names(model)
    found = {f"{last[name]}.{name}": value for name, value in model.state_dict().items()}
    for number, one in enumerate(exits, 1):
        found |= {f"exit{number}.{name}": value for name, value in one.state_dict().items()}
    return found


def _depth(card: Card) -> float:
    return card.capacity.value if card.capacity else math.inf


def _number(name: str) -> int:
    """The number of the stage or exit that a tensor belongs to."""
    return int(name.partition(".")[0].removeprefix("stage").removeprefix("exit"))


def _exits(build: Callable[[str], TwoPartModel], name: str, model: TwoPartModel) -> nn.ModuleList:
    """The exits before the last stage of a model. Exit i is what follows the stages of the model with depth i."""
    depths = (Capacity("depth", depth) for depth in range(1, depth_of(model, name)))
    names = [name_with(architecture_of(name), depth) for depth in depths]
    return nn.ModuleList(exit_of(build(one), one) for one in names)

"""pFedPG (Yang et al., ICCV 2023): the server generates each client's prompts for a frozen transformer."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import nn

from pluribus.client import Client
from pluribus.errors import MismatchError
from pluribus.message import Field, Message, Wire
from pluribus.method import Method, Need, register
from pluribus.methods._prompt_generator import Generator
from pluribus.models import TwoPartModel
from pluribus.models.prompts import Prompting, is_transformer, prompts_of
from pluribus.optim import Rule
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task

ADAMW_DECAY = 0.01  # the usual default of AdamW; without decay it is Adam


@register("pfedpg")
@dataclass(frozen=True)
class PFedPG(Method):
    """Train prompts for a frozen transformer, from a generator on the server that learns from the trained prompts."""

    paper = "Yang et al., ICCV 2023"
    family = "prompts"
    up = "trained prompts"
    down = "the client's own prompts"
    takes = ("image",)
    needs = frozenset({Need.SAME_MODEL, Need.PRETRAINED})
    views = ("after", "before")
    defenses = ("clip", "krum")  # the server learns the prompts of each client
    defaults = MappingProxyType({"models": "tiny-vit-32", "image_size": 16, "batch_size": 16, "momentum": 0.9})

    prompts: int = setting(10, at_least=1, symbol="n")
    """Number of prompts before the first block."""
    heads: int = setting(8, at_least=1)
    """Attention heads of the generator."""
    head_width: int = setting(64, at_least=1)
    """Width of each head."""
    server_lr: float = setting(0.1, above=0, symbol="eta_s")
    """Learning rate of the generator. AdamW needs a smaller one, such as 0.001."""
    server_optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of the generator: SGD without momentum, or AdamW."""
    server_weight_decay: float | None = setting(None, at_least=0)
    """Weight decay of the generator. Default: 0.01 for AdamW, 0 for SGD."""

    def schema(self, task: Task, card: Card) -> Wire:
        tokens = prompts_of(self._attach_prompts(task.shape_of(card.model), task))["tokens"]
        prompts = {"prompts": Field(tuple(tokens.shape), kept=False, source="weights")}
        return Wire(down=prompts, up=prompts)

    def prepare(self, client: Client) -> None:
        self._prompting().attach(client.model, client.task.shape).to(client.device)
        client.frozen = ("model.features.backbone.net.",)  # not saved: loaded again from its source

    def setup(self, server: Server) -> None:
        model = server.task.build(server.cards[0].model, "global")
        prompts = self._prompting().attach(model, server.task.shape).draw(server.draw("base"))
        base = prompts.prompts()["tokens"]
        shape = len(server.cards), self.heads, self.head_width
        server.state.generator = server.make("generator", lambda: Generator(base, *shape))
        server.optimize("generator", server.state.generator, self._rule())

    @torch.no_grad()
    def download(self, server: Server, client: int) -> Message:
        return Message({"prompts": server.state.generator(client)})

    @torch.no_grad()
    def receive(self, client: Client, down: Message) -> None:
        prompts_of(client.model)["tokens"].copy_(down.tensor("prompts"))

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        return Message({"prompts": prompts_of(client.model)["tokens"]})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        # The gradient is sum_i (dP_i / dphi)^T (P_sent - P_trained): P_i moves toward the trained prompts of client i.
        loss = torch.zeros((), device=server.device)
        for i, upload in uploads.items():
            sent, trained = server.state.generator(i), upload.tensor("prompts").to(server.device)
            loss = loss + (sent * (sent.detach() - trained)).sum()
        server.descend(loss, "generator")

    def check(self, task: Task, cards: Cards) -> None:
        model = cards[0].model
        built = task.shape_of(model)
        if not is_transformer(getattr(built.features, "backbone", nn.Identity())):
            raise MismatchError(
                f"pfedpg adds prompts to the tokens of a transformer with a class token, but '{model}' is not one. "
                f"Use for example --models tiny-vit-32."
            )
        self._prompting().skeleton(built, task.shape, model)

    def _rule(self) -> Rule:
        decay = self.server_weight_decay
        if decay is None:
            decay = ADAMW_DECAY if self.server_optimizer == "adamw" else 0.0
        return Rule(self.server_optimizer, lr=self.server_lr, weight_decay=decay)

    def _prompting(self) -> Prompting:
        return Prompting("shallow", self.prompts, 0)

    def _attach_prompts(self, model: TwoPartModel, task: Task) -> TwoPartModel:
        """Attach prompts to a model on the meta device."""
        with torch.device("meta"):
            self._prompting().attach(model, task.shape)
        return model

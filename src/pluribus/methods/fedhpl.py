"""FedHPL (Ma et al., 2024): clients train prompts and a head for a frozen backbone, and share logits."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from pluribus.client import Batch, Client
from pluribus.errors import ConflictError
from pluribus.message import Field, Message, Rows, Value, Wire
from pluribus.method import Method, Need, register
from pluribus.methods import _reports as reports
from pluribus.methods import _sharing as sharing
from pluribus.models import TwoPartModel
from pluribus.models.prompts import Prompting, prompts_of
from pluribus.ops import kl
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task


@register("fedhpl")
@dataclass(frozen=True)
class FedHPL(Method):
    """Train prompts and heads for frozen backbones, with distillation from all clients' correct logits."""

    paper = "Ma et al., arXiv 2024"
    family = "prompts"
    up = "mean correct logit of each class"
    down = "global logit of each class"
    takes = ("image",)
    needs = frozenset({Need.PRETRAINED})
    defaults = MappingProxyType(
        {"models": "tiny", "image_size": 16, "batch_size": 16, "momentum": 0.9, "weight_decay": 1e-4}
    )

    gamma: float = setting(1.0, at_least=0, symbol="gamma")
    """Weight of the distillation loss."""
    temperature: float = setting(4.5, above=0, symbol="T")
    """Temperature of the distillation."""
    prompt: Literal["deep", "shallow"] = "deep"
    """VPT-deep or VPT-shallow: prompts before every block of a transformer, or before the first."""
    prompts: int = setting(3, at_least=1, symbol="n")
    """Prompts per block of a transformer."""
    padding: int = setting(3, at_least=1, symbol="p")
    """Trainable pixels on each side of an image, for backbones other than transformers."""
    upload: Literal["average", "full", "none"] = "average"
    """Upload the mean logit and count per class (Eq. 10), every logit with its label, or nothing (local tuning)."""
    send: Literal["correct", "all"] = "correct"
    """Logits to use: those of correct predictions, or all (ablation)."""
    aggregation: Literal["weighted", "average"] = setting("weighted", symbol="beta_kj")
    """Weights from the widths of the two models (Eq. 7), or 1 (ablation)."""
    denominator: Literal["correct", "all"] = "correct"
    """|D_jc| in Eq. 8: the number of sent logits, or of all samples of the class."""
    kd_t2: bool = False
    """Multiply the distillation loss by T^2, as in other work."""
    share_prompts: bool = setting(False, symbol="+P")
    """Average prompts over clients with the same width and layout."""
    share_head: bool = setting(False, symbol="+H")
    """Average heads over clients with the same width."""

    def check(self, task: Task, cards: Cards) -> None:
        if self.upload == "none" and (self.share_prompts or self.share_head):
            raise ConflictError("--upload none exchanges nothing: leave out --share-prompts and --share-head.")
        for card in cards.firsts():
            self._skeleton(task, card)

    def schema(self, task: Task, card: Card) -> Wire:
        if self.upload == "none":
            return Wire()
        logits = {"logits": Field((task.classes, task.classes), form="rows")}
        report = reports.fields(task.classes, full=self.upload == "full", sizes=self.denominator == "all")
        shared = sharing.fields(self._shapes(task, card))
        return Wire(down=logits | shared, up=report | shared)

    # ---- prompts ---------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        self._prompting().attach(client.model, client.task.shape).draw(client.draw("prompts")).to(client.device)
        client.frozen = ("model.features.backbone.net.",)  # not saved: loaded again from its source

    def _prompting(self) -> Prompting:
        return Prompting(self.prompt, self.prompts, self.padding)

    def _skeleton(self, task: Task, card: Card) -> TwoPartModel:
        return self._prompting().skeleton(task.shape_of(card.model), task.shape, card.model)

    def _shared(self, model: TwoPartModel) -> Mapping[str, Tensor]:
        """+P and +H: the parameters that are sent besides logits."""
        prompts = prompts_of(model) if self.share_prompts else {}
        head = dict(model.head.named_parameters()) if self.share_head else {}
        return {f"prompts.{n}": p for n, p in prompts.items()} | {f"head.{n}": p for n, p in head.items()}

    def _shapes(self, task: Task, card: Card) -> Mapping[str, Tensor]:
        """The same on the meta device."""
        return self._shared(self._skeleton(task, card)) if self.share_prompts or self.share_head else {}

    # ---- client ----------------------------------------------------------------------------------------------------

    def receive(self, client: Client, down: Message) -> None:
        sharing.install(self._shared(client.model), down)

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        if self.upload == "none":
            return Message({})
        return Message({**self._report(client), **self._shared(client.model)})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        logits = client.model(batch.x)
        loss = client.task_loss(logits, batch.y)
        if self.upload == "none":
            return loss
        teacher, temperature = client.got.rows("logits"), self.temperature
        # Eq. 9; without a global logit the client would teach itself, which is a loss of zero
        distil = (kl(teacher.value[batch.y], logits, temperature) * teacher.held[batch.y]).mean()
        return loss + self.gamma * (temperature**2 if self.kd_t2 else 1.0) * distil  # Eq. 2

    def _report(self, client: Client) -> dict[str, Value]:
        """The report of the client's logits after training, in one pass over D_k."""
        labels, logits = client.data["train"].labels(), client.sweep(self.predict)
        chosen = (logits.argmax(1) == labels) | (self.send == "all")  # D~_k
        full, sizes = self.upload == "full", self.denominator == "all"
        return reports.packed(client, logits, chosen, full=full, sizes=sizes)  # Eq. 10

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        state, classes = server.state, server.task.classes
        state.widths = torch.tensor(sorted({card.width for card in server.cards.firsts()}), dtype=torch.float64)
        state.sums = torch.zeros(len(state.widths), classes, classes, dtype=torch.float64)  # of logits, by width d_j
        state.counts, state.sizes = torch.zeros_like(state.sums[:, 0]), torch.zeros_like(state.sums[:, 0])
        sharing.setup(server, lambda card: self._shapes(server.task, card))

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, widths = server.state, server.state.widths.tolist()
        totals = state.sums, state.counts, state.sizes
        for total in totals:
            total.zero_()
        for k, upload in uploads.items():
            for total, part in zip(totals, reports.totals(upload, server.task.classes), strict=True):
                total[widths.index(server.cards[k].width)] += part
        sharing.average(server, uploads)

    def download(self, server: Server, client: int) -> Message:
        if self.upload == "none":
            return Message({})
        state, card = server.state, server.cards[client]
        beta = torch.minimum(card.width / state.widths, state.widths / card.width)  # Eq. 7
        if self.aggregation == "average":
            beta = torch.ones_like(beta)
        total = torch.einsum("j,jcl->cl", beta, state.sums) / (1 + beta @ state.sizes)[:, None]  # Eq. 8
        return Message({"logits": Rows(total.float(), state.counts.sum(0) > 0), **sharing.known(server, card)})

"""FedHPL (Ma et al., 2024): frozen pretrained backbones learn prompts and a head, and teach each other by logits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client, State
from pluribus.errors import ConflictError
from pluribus.message import Dim, Field, Message, Rows, Value, Wire
from pluribus.method import Method, Need, register
from pluribus.models import TwoPartModel
from pluribus.models.prompts import Prompting, prompts_of
from pluribus.ops import kl, onehot, row_means, weighted_mean
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task

MOST_LOGITS = 2**20  # that one client may send in a full upload


@register("fedhpl")
@dataclass(frozen=True)
class FedHPL(Method):
    """Prompts and heads for frozen pretrained backbones, taught by everyone's correct logits of each class."""

    paper = "Ma et al., arXiv 2024"
    up = "mean correct logit of each class"
    down = "global logit of each class"
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
    """Learnable pixels on each side of an image, for backbones that are no transformers."""
    upload: Literal["average", "full", "none"] = "average"
    """Mean logit and count per class (Eq. 10), every logit with its label, or nothing: local prompt tuning."""
    send: Literal["correct", "all"] = "correct"
    """Which logits count: of correct predictions, or of all (ablation)."""
    aggregation: Literal["weighted", "average"] = setting("weighted", symbol="beta_kj")
    """By the widths of the two models (Eq. 7), or 1 (ablation)."""
    denominator: Literal["correct", "all"] = "correct"
    """|D_jc| in Eq. 8: the logits that were sent, or all samples of the class."""
    kd_t2: bool = False
    """T^2 before the distillation loss, as in other work."""
    share_prompts: bool = setting(False, symbol="+P")
    """Prompts are averaged among clients of one width and layout."""
    share_head: bool = setting(False, symbol="+H")
    """Heads are averaged among clients of one width."""

    def schema(self, task: Task, card: Card) -> Wire:
        if self.upload == "none":
            return Wire()
        shared = {n: Field(tuple(v.shape), kept=False, optional=True) for n, v in self._shapes(task, card).items()}
        classes, samples = task.classes, Dim("samples", MOST_LOGITS)
        logits = {"logits": Field((classes, classes), form="rows")}
        if self.upload == "average":
            up = {**logits, "counts": Field((classes,), torch.int32)}
        else:
            up = {"logits": Field((samples, classes)), "labels": Field((samples,), torch.int32)}
        if self.denominator == "all":
            up["sizes"] = Field((classes,), torch.int32)
        return Wire(down=logits | shared, up=up | shared)

    def prepare(self, client: Client) -> None:
        prompts = self._prompting().attach(client.model, client.task.shape)
        prompts.draw(client.draw("prompts"))
        prompts.to(client.device)
        client.frozen = ("model.features.backbone.net.",)  # rebuilt from where it came, not saved

    def setup(self, server: Server) -> None:
        firsts, classes = list(_firsts(server.cards)), server.task.classes
        server.state.widths = torch.tensor(sorted({card.width for card in firsts}), dtype=torch.float64)
        shape = len(server.state.widths), classes
        for name in ("counts", "sizes"):
            setattr(server.state, name, torch.zeros(shape, dtype=torch.float64))
        server.state.sums = torch.zeros(*shape, classes, dtype=torch.float64)
        server.state.means, server.state.known = State(), State()
        for card in firsts:
            for name, value in self._shapes(server.task, card).items():
                setattr(server.state.means, _slot(card, name), torch.zeros(value.shape))
                setattr(server.state.known, _slot(card, name), torch.zeros((), dtype=torch.bool))

    def download(self, server: Server, client: int) -> Message:
        if self.upload == "none":
            return Message({})
        state, card = server.state, server.cards[client]
        beta = torch.minimum(card.width / state.widths, state.widths / card.width)  # Eq. 7, by width d_j
        if self.aggregation == "average":
            beta = torch.ones_like(beta)
        total = torch.einsum("j,jcl->cl", beta, state.sums) / (1 + beta @ state.sizes)[:, None]  # Eq. 8
        return Message({"logits": Rows(total.float(), state.counts.sum(0) > 0), **_known(state, card)})

    def receive(self, client: Client, down: Message) -> None:
        with torch.no_grad():
            for name, value in self._shared(client.model).items():
                if name in down:  # not before someone of this layout has sent any
                    value.copy_(down.tensor(name))

    def local_update(self, client: Client) -> Message:
        client.fit(self.step)
        if self.upload == "none":
            return Message({})
        return Message({**self._knowledge(client), **self._shared(client.model)})

    def loss(self, client: Client, batch: Batch) -> Tensor:
        logits = client.model(batch.x)
        loss = F.cross_entropy(logits, batch.y)
        if self.upload == "none":
            return loss
        teacher, temperature = client.got.rows("logits"), self.temperature
        # Eq. 9; a class without a global logit is taught by the client's own, which is no loss at all
        distil = (kl(teacher.value[batch.y], logits, temperature) * teacher.held[batch.y]).mean()
        return loss + self.gamma * (temperature**2 if self.kd_t2 else 1.0) * distil  # Eq. 2

    def _knowledge(self, client: Client) -> dict[str, Value]:
        """What a client knows after training: its logits, in one pass over all of D_k."""
        labels, logits = client.data["train"].labels(), client.sweep(self.predict)
        chosen = (logits.argmax(1) == labels) | (self.send == "all")
        members = onehot(labels, client.task.classes)
        known: dict[str, Value] = {"sizes": members.sum(0).int()} if self.denominator == "all" else {}
        if self.upload == "full":
            return known | {"logits": logits[chosen], "labels": labels[chosen].int()}
        sent = members * chosen[:, None]
        counts = sent.sum(0)
        return known | {"logits": row_means(sent.T @ logits, counts), "counts": counts.int()}  # Eq. 10

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state, widths = server.state, server.state.widths.tolist()
        for value in (state.sums, state.counts, state.sizes):
            value.zero_()
        for k, upload in uploads.items():
            j = widths.index(server.cards[k].width)
            sums, counts = _sums(upload, server.task.classes)
            state.sums[j] += sums
            state.counts[j] += counts
            state.sizes[j] += upload.tensor("sizes") if self.denominator == "all" else counts
        for slot, mean in state.means.named_buffers():
            _average(server, slot, mean, uploads)

    def check(self, task: Task, cards: Mapping[int, Card]) -> None:
        if self.upload == "none" and (self.share_prompts or self.share_head):
            raise ConflictError("--upload none exchanges nothing: leave out --share-prompts and --share-head.")
        for card in _firsts(cards):
            self._prompting().skeleton(task.shape_of(card.model), task.shape, card.model)

    def _prompting(self) -> Prompting:
        return Prompting(self.prompt, self.prompts, self.padding)

    def _shared(self, model: TwoPartModel) -> Mapping[str, Tensor]:
        """What travels besides logits, live."""
        prompts = prompts_of(model) if self.share_prompts else {}
        head = dict(model.head.named_parameters()) if self.share_head else {}
        return {f"prompts.{n}": p for n, p in prompts.items()} | {f"head.{n}": p for n, p in head.items()}

    def _shapes(self, task: Task, card: Card) -> Mapping[str, Tensor]:
        """The same without numbers."""
        if not (self.share_prompts or self.share_head):
            return {}
        return self._shared(self._prompting().skeleton(task.shape_of(card.model), task.shape, card.model))


def _sums(upload: Message, classes: int) -> tuple[Tensor, Tensor]:
    """Sum and number of a client's logits per class; the same from both kinds of upload (Eq. 36)."""
    if "labels" in upload:
        members = onehot(upload.tensor("labels"), classes).double()
        return members.T @ upload.tensor("logits").double(), members.sum(0)
    counts = upload.tensor("counts").double()
    return upload.rows("logits").value.double() * counts[:, None], counts


def _average(server: Server, slot: str, mean: Tensor, uploads: Mapping[int, Message]) -> None:
    """+P and +H: into `mean`, that over whoever has its width and layout, weighted by n_k."""
    width, name = _parsed(slot)
    alike = {
        k: {"": upload.tensor(name)}
        for k, upload in uploads.items()
        if server.cards[k].width == width and name in upload and upload.tensor(name).shape == mean.shape
    }
    if alike:
        mean.copy_(weighted_mean(alike, {k: server.cards[k].samples for k in alike})[""])
        getattr(server.state.known, slot).fill_(True)


def _firsts(cards: Mapping[int, Card]) -> Iterable[Card]:
    """One card of each architecture, without looking at ten thousand."""
    if isinstance(cards, Cards):
        return [cards[k] for k in cards.architectures().values()]
    return {card.model: card for card in cards.values()}.values()


def _slot(card: Card, name: str) -> str:
    return f"{card.model}:{card.width}:{name}".replace(".", "/")  # names in a state have no dots


def _known(state: State, card: Card) -> dict[str, Tensor]:
    """Averaged prompts and head for a client, as far as anyone like it has sent some."""
    slots = [slot for slot, known in state.known.named_buffers() if slot.startswith(_slot(card, "")) and known]
    return {_parsed(slot)[1]: getattr(state.means, slot) for slot in slots}


def _parsed(slot: str) -> tuple[int, str]:
    """Width and name of what a slot of the server's state holds."""
    _, width, name = slot.split(":")
    return int(width), name.replace("/", ".")

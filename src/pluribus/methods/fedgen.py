"""FedGen (Zhu et al., ICML 2021): the server trains a generator of features, and clients also train on its features.

This is the variant for different models: feature extractors stay private, and only the heads are averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.draws import uniform_bits
from pluribus.message import Field, Message, Wire, schema_of
from pluribus.method import Method, Need, register
from pluribus.methods._generator import Frozen, Generator, alikeness, label_at
from pluribus.ops import Weighting, average_uploads, class_counts, kl
from pluribus.optim import Rule
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Task


@register("fedgen")
@dataclass(frozen=True)
class FedGen(Method):
    """Average heads, and train a feature generator on the server against all heads."""

    paper = "Zhu et al., ICML 2021"
    family = "knowledge"
    up = "the head; once: training samples per class"
    down = "the mean head, the generator, share of each class"
    needs = frozenset({Need.SAME_WIDTH, Need.SAME_HEAD})
    enrols = True
    views = ("after", "before")

    teach: float = setting(10.0, at_least=0, symbol="alpha")
    """Weight of the cross-entropy of the head on generated features."""
    guide: float = setting(10.0, at_least=0, symbol="beta")
    """Weight of the divergence between predictions and those for a generated feature of the same label."""
    fade: float = setting(0.98, above=0, at_most=1)
    """Factor on alpha and beta after every round."""
    diversity: float = setting(1.0, at_least=0, symbol="eta")
    """Weight of the generator's diversity loss."""
    noise: int = setting(32, at_least=1, symbol="d_eps")
    """Width of the generator's noise."""
    hidden: int = setting(256, at_least=1, symbol="H")
    """Width of the generator's hidden layer."""
    generator_lr: float = setting(3e-4, above=0)
    """Learning rate of the generator (Adam)."""
    generator_steps: int = setting(50, at_least=1)
    """Gradient steps of the generator per round."""
    generator_batch: int = setting(32, at_least=2)  # batch normalization has no variance of one sample
    """Generated features per step on the server."""
    weighting: Weighting = "samples"
    """Weights of clients in the mean: their training samples, or equal."""

    def schema(self, task: Task, card: Card) -> Wire:
        head = schema_of(task.shape_of(card.model).head, "head.")
        with torch.device("meta"):
            made = schema_of(Generator(self.noise, task.classes, self.hidden, card.width), "generator.")
        shares = {"shares": Field((task.classes,), kept=False)}
        counts = Field((task.classes,), torch.int32, least=0, source="statistic")
        return Wire(down=head | made | shares, up=head, once={"counts": counts})

    def schedule(self, t: int, rounds: int) -> dict[str, float]:
        now = self.fade**t if t else 0.0  # the generator is untrained before the first aggregation
        return {"alpha": self.teach * now, "beta": self.guide * now}

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        classes = client.task.classes
        shape = self.noise, classes, self.hidden, client.card.width
        client.state.generator = client.task.make("generator", lambda: Frozen(*shape).eval())
        client.state.edges = torch.arange(1, classes + 1, dtype=torch.float64)  # cumulative p(y)
        client.state.key = torch.zeros((), dtype=torch.int64)  # of the noise: a step has no random generator

    def enrol(self, client: Client) -> Message:
        return Message({"counts": class_counts(client).int()})

    def receive(self, client: Client, down: Message) -> None:
        client.model.head.load_state_dict(down.part("head."))
        client.state.generator.load_state_dict(down.part("generator."))
        client.state.edges = down.tensor("shares").double().cumsum(0)

    def local_update(self, client: Client) -> Message:
        client.state.key = torch.randint(2**62, (), generator=client.draw("noise"))
        client.fit(self.step)
        return Message.of(client.model.head, "head.")

    def loss(self, client: Client, batch: Batch) -> Tensor:
        head, generator, logits = client.model.head, client.state.generator, client.model(batch.x)
        ours, theirs, u = torch.split(self._draw_noise(client, batch.n), [self.noise, self.noise, 1], 1)
        labels = label_at(client.state.edges, u[:, 0])
        taught = F.cross_entropy(head(generator(theirs, labels)), labels)
        guided = kl(head(generator(ours, batch.y)).detach(), logits).mean()
        return client.task_loss(logits, batch.y) + client.now["alpha"] * taught + client.now["beta"] * guided

    def _draw_noise(self, client: Client, rows: int) -> Tensor:
        """Draw new numbers in [0, 1) for each step."""
        columns = 2 * self.noise + 1
        bits = uniform_bits(client.state.key, rows * columns, client.device).view(rows, columns)
        client.state.key += 1
        return bits / 2**24

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        task, state = server.task, server.state
        state.head = task.build(server.cards[0].model, "global").head.eval().to(server.device)
        shape = self.noise, task.classes, self.hidden, server.cards[0].width
        state.generator = task.make("generator", lambda: Generator(*shape))
        server.optimize("generator", state.generator, Rule("adam", self.generator_lr))
        state.counts = torch.zeros(task.classes, dtype=torch.float64)  # sum over all clients that have answered
        state.counted = torch.zeros(task.clients, dtype=torch.bool)

    def download(self, server: Server, client: int) -> Message:
        state = server.state
        counts = state.counts if state.counts.any() else torch.ones_like(state.counts)
        shares = {"shares": (counts / counts.sum()).float()}
        return Message({**Message.of(state.head, "head."), **Message.of(state.generator, "generator."), **shares})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        state = server.state
        counts = torch.stack([_counts(server, k) for k in uploads])
        new = torch.tensor([not state.counted[k] for k in uploads])
        state.counts += counts[new].sum(0)
        state.counted[list(uploads)] = True
        self._train_generator(server, [upload.part("head.") for upload in uploads.values()], counts)
        state.head.load_state_dict(average_uploads(server, uploads, "head.", self.weighting))

    def _train_generator(self, server: Server, heads: Sequence[Mapping[str, Tensor]], counts: Tensor) -> None:
        """Train against these heads; `counts` are their training samples per class."""
        psi = {f"psi.{name}": torch.stack([head[name] for head in heads]) for name in heads[0]}
        weights = (counts / counts.sum(0).clamp(min=1)).float()  # w_i^(y), over the clients that answered
        rows = self.generator_steps * self.generator_batch
        labels = label_at(server.state.counts.cumsum(0), torch.rand(rows, generator=server.draw("labels")))
        noise = torch.rand(rows, self.noise, generator=server.draw("noise"))
        given, batch = {"weights": weights, **psi}, self.generator_batch
        loss = server.fit(self.generator_loss, noise, labels, opts=("generator",), batch=batch, given=given)
        server.notes["generator_loss"] = float(loss)

    def generator_loss(self, server: Server, batch: Batch) -> Tensor:
        """What the heads say of generated features, each by its share of the label, and how alike the features are."""
        eps, y, state = batch.x, batch.y, server.state
        psi = {name.removeprefix("psi."): value for name, value in server.given.items() if name.startswith("psi.")}
        made = state.generator(eps, y)
        logits = vmap(lambda one: functional_call(state.head, one, (made,)))(psi)
        ce = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(logits)), reduction="none").view(len(logits), -1)
        return (server.given["weights"][:, y] * ce).sum(0).mean() + self.diversity * alikeness(eps, made)


def _counts(server: Server, client: int) -> Tensor:
    enrolled = server.cards[client].enrolled
    assert enrolled is not None
    return enrolled.tensor("counts").double()

"""FedL2G (anonymous, under review 2024): the server learns one guiding vector per class that reduces the clients' loss.

A client trains on its study set with cross-entropy plus the distance to the guiding vectors. The server updates the
vectors by the gradient of the loss on a held-out quiz set after one such training step. That step is linear in the
vectors, so their gradient needs two gradients and one Jacobian-vector product, and no second derivative.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client
from pluribus.errors import ConflictError, PartitionError
from pluribus.message import Field, Message, Rows, Wire
from pluribus.method import Method, Need, Sizes, Traffic, name_of, register
from pluribus.ops import derivable, directional, onehot, recurrent, rows_mean, turn_into_gradients
from pluribus.server import Server
from pluribus.settings import setting
from pluribus.task import Card, Cards, Task

Parameters = Mapping[str, Tensor]
SMALLEST_QUIZ = 2  # batch normalization needs two samples for a variance


@dataclass(frozen=True)
class FedL2G(Method):
    """Algorithm 1. FedL2G-l guides logits, FedL2G-f guides features."""

    unbounded = "a row acts on the guide gradients of all others through the quiz gradient, so that no row has a bound."
    paper = "FedL2G, under review 2024"
    family = "knowledge"
    up = "gradient of the guiding vectors, for the classes of one batch"
    down = "the guiding vectors"
    guides: ClassVar[Literal["logits", "features"]]
    defaults = MappingProxyType({"rounds": 40, "lr": 0.05})  # on digits, the paper's 0.01 takes hundreds of rounds

    server_lr: float = setting(0.1, at_least=0, symbol="eta_s")
    """Learning rate of the guiding vectors; 0 freezes them."""
    warmup: int = setting(50, at_least=0, symbol="T'")
    """Additional rounds before training, in which only the guiding vectors learn. 0 is an ablation."""
    quiz: int | None = setting(None, at_least=SMALLEST_QUIZ, symbol="|D^q|")
    """Samples in the quiz set of a client. Default: one batch, but at most half of the client's samples."""

    def guided(self, features: Tensor, logits: Tensor) -> Tensor:
        """a: the activations that are pulled toward the guiding vectors."""
        return logits if self.guides == "logits" else features

    def guide_width(self, task: Task, card: Card) -> int:
        """M: the width of a guiding vector."""
        return task.classes if self.guides == "logits" else card.width

    def warmup_rounds(self) -> int:
        return self.warmup

    def schema(self, task: Task, card: Card) -> Wire:
        shape = (task.classes, self.guide_width(task, card))
        return Wire(down={"guides": Field(shape)}, up={"gradient": Field(shape, form="rows", source="gradient")})

    def check(self, task: Task, cards: Cards) -> None:
        if self.quiz is None:
            return
        if not task.share_counts:
            raise ConflictError(
                "--quiz must leave every client rows to train on, but no client tells how many it has "
                "(--no-share-counts): leave out --quiz, so that each client chooses the size itself."
            )
        for card in cards.values():
            if card.samples <= self.quiz:
                raise PartitionError(
                    f"client {card.id} has {card.samples} training samples: a quiz of {self.quiz} leaves none "
                    f"for training. Use a smaller --quiz, fewer clients (--clients) or a larger --min-samples."
                )

    def warnings(self, task: Task, models: Iterable[str]) -> list[str]:
        name = name_of(type(self))
        found = [
            f"{name}: '{model}' has recurrent layers, which have no forward-mode derivative: "
            f"its reports need a double backward pass, which takes longer."
            for model in models
            if recurrent(task.shape_of(model))
        ]
        if not self.warmup:
            found.append(f"{name}: --warmup is 0, but the paper requires a warm-up: random vectors misguide training.")
        return found

    def traffic(self, task: Task, card: Card, sizes: Sizes) -> Traffic:
        held = min(sizes.held, sizes.batch)  # the classes of one batch
        return super().traffic(task, card, sizes._replace(held=held))

    # ---- client ----------------------------------------------------------------------------------------------------

    def prepare(self, client: Client) -> None:
        """Line 1: split the training data once into a study set D^s and a quiz set D^q."""
        train = client.data["train"]
        size = self.quiz if self.quiz is not None else min(max(client.local.batch, SMALLEST_QUIZ), len(train) // 2)
        size = size if size >= SMALLEST_QUIZ else 0  # a client with too few samples only trains
        shuffled = train[torch.randperm(len(train), generator=client.draw("quiz"))]
        client.data["quiz"], client.data["study"] = shuffled[:size], shuffled[size:]
        client.state.gradient = torch.zeros(client.task.classes, self.guide_width(client.task, client.card))

    def local_update(self, client: Client) -> Message:
        if client.t >= client.task.warmup:  # line 6
            client.fit(self.step, on="study")  # line 7
        if len(client.data["quiz"]):
            client.fit(self.guide_step, on="study", steps=1)  # lines 10 and 11
        gradient = client.state.gradient
        return Message({"gradient": Rows(gradient, (gradient != 0).any(1))})  # line 12

    def step(self, client: Client, batch: Batch) -> Tensor:
        features = client.features(batch.x)
        logits = client.model.head(features)
        task_loss = client.task_loss(logits, batch.y)
        client.descend(task_loss + self._guiding_loss(client, batch, features, logits))  # Eq. 4
        return task_loss

    def guide_step(self, client: Client, batch: Batch) -> None:
        """Keep the gradient of the guiding vectors. No weight changes.

        It returns no loss, because the logged loss is that of training on the study set.
        """
        client.state.gradient = self._guide_gradient(client, batch)

    def private_gradient(self, client: Client, batch: Batch) -> dict[str, Tensor]:
        return {"gradient": self._guide_gradient(client, batch)}

    def _guide_gradient(self, client: Client, batch: Batch) -> Tensor:
        """pi_i, the gradient of the guiding vectors: of the quiz loss after a pseudo-step.

        With theta' = theta - eta_c grad L(theta, G) and g_q = grad CE(quiz; theta'), the class-c row is
        2 eta_c / (M |B|) times the sum of J_j g_q over the batch's samples j of class c, J_j = d a_j / d theta.
        """
        eta, theta = client.now["lr"], client.parameters()
        quiz = client.data["quiz"]
        quiz_x, quiz_y = quiz.take(torch.arange(len(quiz), device=client.device))

        def activations(theta: Parameters) -> Tensor:
            return self.guided(*self._forward(client, batch.x, theta))

        with derivable(client):
            features, logits = self._forward(client, batch.x, theta)
            task_loss = client.task_loss(logits, batch.y)
            study = client.grads(task_loss + self._guiding_loss(client, batch, features, logits))
            moved = {name: theta[name].detach() - eta * study.pop(name) for name in list(study)}  # Eq. 5
            turn_into_gradients(lambda: client.task_loss(self._forward(client, quiz_x, moved)[1], quiz_y), moved)
            g_q = moved  # overwrites theta'
            at = {name: theta[name].detach() for name in g_q}
            rate = directional(client, activations, at, g_q)  # J_j g_q
        members = onehot(batch.y, client.task.classes).to(rate.dtype)
        return (2 * eta / (rate.shape[1] * batch.n)) * (members.T @ rate)

    def _forward(self, client: Client, x: Tensor, theta: Parameters) -> tuple[Tensor, Tensor]:
        features = client.call(x, theta, "features")
        return features, client.call(features, theta, "head")

    def _guiding_loss(self, client: Client, batch: Batch, features: Tensor, logits: Tensor) -> Tensor:
        return F.mse_loss(self.guided(features, logits), client.got.tensor("guides")[batch.y])

    # ---- server ----------------------------------------------------------------------------------------------------

    def setup(self, server: Server) -> None:
        server.state.guides = self._draw_initial(server)

    def _draw_initial(self, server: Server) -> Tensor:
        """Draw G^0, standard normal."""
        shape = (server.task.classes, self.guide_width(server.task, server.cards[0]))
        return torch.randn(shape, generator=server.task.draw("guides"))

    def download(self, server: Server, client: int) -> Message:
        return Message({"guides": server.state.guides})

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        """Lines 13 and 14: average over the clients that report a class. A class without a report does not change."""
        mean = rows_mean([upload.rows("gradient") for upload in uploads.values()])
        server.state.guides = server.state.guides - self.server_lr * mean.value
        start = self._draw_initial(server)
        server.notes["guides_moved"] = float((server.state.guides - start).norm() / start.norm())
        server.notes["reports"] = {str(k): float(up.rows("gradient").value.norm()) for k, up in uploads.items()}


@register("fedl2g-l")
@dataclass(frozen=True)
class FedL2GLogits(FedL2G):
    """Guiding vectors for the logits, learned from quiz gradients; needs only common labels."""

    guides = "logits"
    # The gradients of the small embedded models are so small that the vectors hardly change with the paper's 0.1.
    defaults = MappingProxyType({**FedL2G.defaults, "server_lr": 1.0})

    server_lr: float = setting(0.1, at_least=0, symbol="eta_s")
    """Learning rate of the guiding vectors; 0 freezes them. Default: 0.1; 1 on the embedded data and models."""


@register("fedl2g-f")
@dataclass(frozen=True)
class FedL2GFeatures(FedL2G):
    """Guiding vectors for the features, learned from quiz gradients."""

    guides = "features"
    needs = frozenset({Need.SAME_WIDTH})

    server_lr: float = setting(100.0, at_least=0, symbol="eta_s")
    """Learning rate of the guiding vectors; 0 freezes them. Default: 100."""

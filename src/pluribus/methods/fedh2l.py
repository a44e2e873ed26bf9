"""FedH2L (Li et al., 2021): peers teach each other on public seed data, without conflict with local learning.

There is no server. Each client takes a step on its own data, sends its posteriors on a batch of its public data, and
learns from the others' posteriors. A gradient that conflicts with the local gradient is projected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pluribus.client import Batch, Client, Data, trainable
from pluribus.errors import ConflictError
from pluribus.message import Dim, Field, Inbox, Message, Wire
from pluribus.method import Need, PeerMethod, register
from pluribus.methods._lessons import public_batch, row_by_row
from pluribus.methods.ind import SETTINGS, own_and_public
from pluribus.ops import flatten, project, unflatten
from pluribus.optim import Opt
from pluribus.settings import setting
from pluribus.targets import TARGETS
from pluribus.task import Card, Cards, Task


@register("fedh2l")
@dataclass(frozen=True)
class FedH2L(PeerMethod):
    """Peers learn from each other's posteriors on public data, by gradients that do not conflict with their own."""

    paper = "Li et al., 2021"
    family = "knowledge"
    up = "posteriors on a public batch, and their accuracy"
    down = "the same of every teacher"
    targets = TARGETS
    needs = frozenset({Need.PUBLIC_DATA})
    defenses = ("clip",)  # teachers speak about different rows
    defaults = SETTINGS

    labels: Literal["all", "own", "none"] = "all"
    """Use other clients' public labels in local steps and lessons (all), in lessons (own), or nowhere (none)."""
    every: int = setting(1, at_least=1, symbol="E")
    """Local steps between lessons. A round is one local step."""
    pairs: bool = False
    """Asynchronous variant: in every lesson each client learns from one random partner."""
    kl: bool = True
    """Learn from posteriors (Eq. 3). Off: learn from public labels alone."""
    conflict: Literal["project", "ignore", "pcgrad"] = "project"
    """If a lesson conflicts with the local gradient: project it (Eq. 8), ignore it, or project both (PCGrad)."""
    margin: float = setting(0.0, at_least=0, symbol="v*")
    """Least value in a projection, as in GEM's solver. Above 0, lessons turn further toward the local gradient."""
    eps: float = setting(0.0, at_least=0, symbol="v*")
    """Added to the denominator, as in GEM's solver. Above 0, some of the conflict stays."""
    lesson_lr: float | None = setting(None, above=0, symbol="eta")
    """Learning rate of lessons, with a separate optimizer. Default: one optimizer takes both steps, with --lr."""

    def check(self, task: Task, cards: Cards) -> None:
        if self.conflict == "pcgrad" and (self.every > 1 or self.pairs or self.lesson_lr is not None):
            raise ConflictError(
                "--conflict pcgrad takes both gradients in one step: use --every 1, no --pairs and no --lesson-lr."
            )
        if not self.kl and self.labels == "none":
            raise ConflictError("--no-kl and --labels none leave nothing to learn from peers: remove one of them.")
        if self.labels != "none" and not task.public_labels:
            raise ConflictError(f"--labels {self.labels} needs labels of public rows: use --labels none.")
        if self.conflict != "project" and max(self.margin, self.eps) > 0:
            raise ConflictError("--margin and --eps need --conflict project: set both to 0, or use --conflict project.")

    def schema(self, task: Task, card: Card) -> Wire:
        batch = Dim("batch", max(task.public.values()))
        most = None if task.target.kind == "numbers" else 1.001  # more than 1, because a GPU rounds
        posterior = Field((batch, task.classes), least=None if most is None else 0, most=most, source="public")
        # the accuracy is of public rows, too: it follows from the posteriors and the public labels
        return Wire(up={"posterior": posterior, "accuracy": Field((), least=0, most=1, source="public")})

    def topology(self, task: Task, t: int, present: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
        if not self.pairs:
            return super().topology(task, t, present)
        order = [present[i] for i in torch.randperm(len(present), generator=task.draw("pairs", t)).tolist()]
        couples = zip(order[::2], order[1::2], strict=False)  # if the number is odd, one client is idle
        return {student: (teacher,) for a, b in couples for student, teacher in ((a, b), (b, a))}

    def optimizers(self, client: Client) -> dict[str, Opt]:
        both = {"model": Opt(client.model, life="run")}
        if self.lesson_lr is None:
            return both
        return both | {"lesson": Opt(client.model, replace(client.local.rule, lr=self.lesson_lr), life="run")}

    def prepare(self, client: Client) -> None:
        client.data["local"] = own_and_public(client, everyones=self.labels == "all")
        client.state.local_gradient = torch.zeros(trainable(client.model))

    # ---- first phase: local training, then posteriors for the students ---------------------------------------------

    def teach(self, client: Client) -> Message | None:
        if self.conflict == "pcgrad" and client.state.local_gradient.any():
            # the last lesson was lost, and with it the step for both gradients: take the local step now
            client.apply(unflatten(client.state.local_gradient, client.parameters()))
            client.state.local_gradient = torch.zeros_like(client.state.local_gradient)
        client.fit(self.local_step, on="local", steps=1)
        data = public_batch(client, client.card.id)
        if (client.t + 1) % self.every or not len(data):
            return None
        target = client.task.target
        posterior = target.posterior(client.sweep(self.predict, data))
        # without labels, all teachers count equally
        known = client.task.public_labels
        accuracy = target.confidence(posterior, data.labels()) if known else posterior.new_ones(())
        # all messages of a round have one shape: students drop the padding of a small public set
        most = min(client.local.batch, max(client.task.public.values()))
        return Message({"posterior": F.pad(posterior, (0, 0, 0, most - len(data))), "accuracy": accuracy})

    def local_step(self, client: Client, batch: Batch) -> Tensor:
        loss = client.task_loss(client.model(batch.x), batch.y)  # Eq. 1
        grads = client.grads(loss)  # Eq. 2
        client.state.local_gradient = client.state.local_gradient + flatten(grads, client.parameters())
        if self.conflict != "pcgrad":
            client.apply(grads)
        return loss

    # ---- second phase: mutual learning -----------------------------------------------------------------------------

    def learn(self, client: Client, inbox: Inbox) -> None:
        lessons = [public_batch(client, teacher) for teacher in inbox.ids]
        together = Data.join(lessons)
        client.inbox = row_by_row(inbox, [len(data) for data in lessons])
        # the teachers' posteriors are of images without augmentation
        client.fit(self.public_step, on=together, steps=1, batch=len(together), augment=False)
        client.state.local_gradient = torch.zeros_like(client.state.local_gradient)

    def public_step(self, client: Client, batch: Batch) -> Tensor:
        assert client.inbox is not None
        taught, confidence, share = (client.inbox.got[name][batch.i] for name in ("posterior", "accuracy", "share"))
        logits = client.model(batch.x)
        loss: Tensor = logits.new_zeros(())
        if self.kl:
            divergence = client.task.target.divergence_from(taught, logits)  # Eq. 4
            loss = loss + (share * confidence * divergence).sum()  # Eq. 3
        if self.labels != "none":
            loss = loss + (share * client.task_loss(logits, batch.y, reduction="none")).sum()  # Eq. 5
        lesson = flatten(client.grads(loss), client.parameters())  # Eq. 6
        resolved = unflatten(self._resolve(lesson, client.state.local_gradient), client.parameters())
        client.apply(resolved, "model" if self.lesson_lr is None else "lesson")
        return loss

    def _resolve(self, lesson: Tensor, local: Tensor) -> Tensor:
        """Resolve the conflict between both gradients, and return the gradient to apply."""
        if self.conflict == "ignore":
            return lesson
        if self.conflict == "pcgrad":
            return project(lesson, local) + project(local, lesson)
        return project(lesson, local, self.margin, self.eps)  # Eq. 7, 8

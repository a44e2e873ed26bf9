"""How a client's steps are executed. `Eager` does what is written, one operation after the other; an engine may bring
a runner that replays recorded steps, or takes one step for many clients at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from pluribus import draws
from pluribus.data.augment import Augment
from pluribus.data.federated import Data
from pluribus.internal.batches import Batch, gathered

if TYPE_CHECKING:
    from pluribus.client import Client

SWEEP_BATCH = 256  # rows per forward pass where no gradient is needed

Step = Callable[["Client", Batch], Tensor | None]
Loss = Callable[["Client", Batch], Tensor]
Map = Callable[["Client", Tensor], Tensor]


@dataclass(frozen=True)
class Descent:
    """The step that descends a loss with these optimizers. Equal ones are one step to an engine that records steps."""

    loss: Loss
    opts: tuple[str, ...]

    def __call__(self, client: Client, batch: Batch) -> Tensor:
        """One step; the loss to be logged."""
        loss = self.loss(client, batch)
        client.descend(loss, *self.opts)
        return loss


class Fit(NamedTuple):
    """One call of `client.fit`: a step, a set, and the positions in it that are visited, batch after batch."""

    step: Step
    data: Data
    order: Tensor
    sizes: list[int]
    key: tuple[draws.Key, ...]  # of what layers draw from torch's global generators
    augment: Augment | None = None  # what happens to the images, in the order of visits


class Runner(Protocol):
    """Executes the steps of clients."""

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        """All steps of a fit; the mean loss over its samples, None if no step gave one."""

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        """`rows` of every sample of a set, in order; the client is in eval mode."""


class Eager:
    """One operation after the other, as the step says."""

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        """All steps of a fit; the mean loss over its samples, None if no step gave one."""
        total = torch.zeros((), device=client.device)
        samples = 0
        with draws.seeded(*fit.key, device=client.device), client.autocast():
            for batch in gathered(fit.data, fit.order.to(client.device), fit.sizes, fit.augment):
                loss = fit.step(client, batch)
                if loss is not None:
                    total += loss.detach() * batch.n
                    samples += batch.n
        return total / samples if samples else None

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        """`rows` of every sample of a set, in order; the client is in eval mode."""
        order = torch.arange(len(data), device=client.device)
        with torch.no_grad(), client.autocast():
            return torch.cat([rows(client, b.x).float() for b in gathered(data, order, sweep_sizes(len(data)))])


def sweep_sizes(samples: int) -> list[int]:
    """Rows per forward pass over a set."""
    full, rest = divmod(samples, SWEEP_BATCH)
    return [SWEEP_BATCH] * full + [rest] * (rest > 0)

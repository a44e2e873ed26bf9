"""Runners execute the steps of a client or of the server. `Eager` and `EagerServer` run one operation after the other;
an engine may have a runner that replays recorded steps, or one that takes a step for many clients at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pluribus import draws
from pluribus.data.augment import Augment
from pluribus.data.federated import Data
from pluribus.internal.batches import Batch, batch_sizes, gather
from pluribus.internal.devices import CPU

if TYPE_CHECKING:
    from pluribus.client import Client
    from pluribus.server import Server

SWEEP_BATCH = 256  # rows per forward pass without gradients

Step = Callable[["Client", Batch], Tensor | None]
Loss = Callable[["Client", Batch], Tensor]
Map = Callable[["Client", Tensor], Tensor]
ServerLoss = Callable[["Server", Batch], Tensor]


class Learner(Protocol):
    """A client or the server: whoever has optimizers."""

    def descend(self, loss: Tensor, *opts: str) -> None:
        """Run one backward pass, then one step of each named optimizer."""


L = TypeVar("L", bound=Learner)


@dataclass(frozen=True)
class RowStep:
    """The first part of a private step: adds up the clipped gradients of single rows."""

    step: Step
    opts: tuple[str, ...]

    def __call__(self, client: Client, batch: Batch) -> None:
        assert client.guard is not None
        client.guard.add_rows(client, self, batch)

    def finish(self) -> RowFinish:
        return RowFinish(self.step, self.opts)


@dataclass(frozen=True)
class RowFinish:
    """The second part of a private step: adds noise to the sum, and lets the optimizers take a step with it."""

    step: Step
    opts: tuple[str, ...]

    def __call__(self, client: Client, batch: Batch) -> None:
        assert client.guard is not None
        client.guard.take_step(client, RowStep(self.step, self.opts))


@dataclass(frozen=True)
class Descent(Generic[L]):
    """The step that descends a loss with these optimizers. Equal ones are one step to an engine that records steps."""

    loss: Callable[[L, Batch], Tensor]
    opts: tuple[str, ...]

    def __call__(self, learner: L, batch: Batch) -> Tensor:
        loss = self.loss(learner, batch)
        learner.descend(loss, *self.opts)
        return loss


class Finish(NamedTuple):
    """The second part of a step whose batch is visited in chunks: it runs after the last chunk of each batch.

    `prepare` runs before it, and is not recorded.
    """

    step: Step
    ends: list[bool]  # for each chunk, whether it is the last one of its batch
    prepare: Callable[[], None]


class Fit(NamedTuple):
    """One call of `client.fit`: a step, a data set, and the positions to visit, batch by batch."""

    step: Step
    data: Data
    order: Tensor
    sizes: list[int]
    key: tuple[draws.Key, ...]  # seeds torch's global generators, for layers that draw from them
    augment: Augment | None = None  # augmentation of the images, in the order of visits
    finish: Finish | None = None


class Runner(Protocol):
    """Executes the steps of clients."""

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        """Take all steps of a fit; returns the mean loss over its samples, None if no step returned a loss."""

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        """Apply `rows` to every sample of a data set, in order; the client is in eval mode."""


class Eager:
    """Runs one operation after the other, as the step is written."""

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        total = torch.zeros((), device=client.device)
        samples = 0
        with draws.seeded(*fit.key, device=client.device), client.autocast():
            visits = gather(fit.data, fit.order.to(fit.data.rows.device), fit.sizes, fit.augment)
            for number, batch in enumerate(visits):
                loss = fit.step(client, batch)
                if fit.finish is not None and fit.finish.ends[number]:
                    fit.finish.prepare()
                    fit.finish.step(client, batch)
                if loss is not None:
                    total += loss.detach() * batch.n
                    samples += batch.n
        return total / samples if samples else None

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        order = torch.arange(len(data), device=data.rows.device)
        with torch.no_grad(), client.autocast():
            return torch.cat([rows(client, b.x).float() for b in gather(data, order, sweep_sizes(len(data)))])


def sweep_sizes(samples: int) -> list[int]:
    """Rows of each forward pass over a data set."""
    return batch_sizes(samples, SWEEP_BATCH, least=0)


class ServerFit(NamedTuple):
    """One call of `server.fit`: a step, rows and labels, the rows to visit, batch by batch, and what the loss is given.

    All tensors are contiguous, as buffers are, so that recorded steps see the same layout.
    """

    step: Descent[Server]
    x: Tensor
    y: Tensor
    order: Tensor
    sizes: list[int]
    given: Mapping[str, Tensor]
    shares: list[float] | None = None  # of the learning rates, for each step; None: all of them

    def set_rates(self, server: Server, number: int) -> None:
        """Set the learning rates for a step, before it runs."""
        if self.shares is not None:
            server.anneal(self.step.opts, self.shares[number])


class ServerRunner(Protocol):
    """Executes the steps of the server."""

    device: torch.device

    def fit(self, server: Server, fit: ServerFit) -> Tensor:
        """Take all steps of a fit, of which there is at least one; returns the last loss."""


class EagerServer:
    """Runs one operation after the other, as the loss is written."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device

    def fit(self, server: Server, fit: ServerFit) -> Tensor:
        x, y, order = (value.to(self.device) for value in (fit.x, fit.y, fit.order))
        with server.reading({name: value.to(self.device) for name, value in fit.given.items()}):
            for number, rows in enumerate(torch.split(order, fit.sizes)):
                fit.set_rates(server, number)
                loss = fit.step(server, Batch(x[rows], y[rows], rows, len(rows)))
        return loss.detach()

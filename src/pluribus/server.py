"""The server: it sees cards and messages, never a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from pluribus import draws
from pluribus.data.federated import Data
from pluribus.draws import Made
from pluribus.errors import UserCodeError
from pluribus.internal.batches import batch_sizes
from pluribus.internal.defenses import UNDEFENDED, Defense
from pluribus.internal.devices import CPU
from pluribus.internal.state import State
from pluribus.internal.steps import Descent, EagerServer, ServerFit, ServerLoss, ServerRunner
from pluribus.optim import Life, Opt, Optimizer, Rule
from pluribus.task import Cards, Task


class PublicRows:
    """Public rows at the server, without labels."""

    def __init__(self, data: Data, device: torch.device = CPU) -> None:
        self._data, self._device = data, device

    def __len__(self) -> int:
        return len(self._data)

    def take(self, positions: Tensor) -> Tensor:
        """The rows at these positions, as a model gets them, on `server.device`."""
        return self._data.take(positions)[0].to(self._device)


class Server:
    """What a method keeps and does on the server. Only losses of `fit` are captured; other code may read values.

    `device` is where modules with an optimizer are: the CUDA GPU of a simulation, or the CPU. Messages are on the CPU.
    """

    def __init__(
        self,
        task: Task,
        cards: Cards,
        runner: ServerRunner | None = None,
        defense: Defense = UNDEFENDED,
        public: PublicRows | None = None,
    ) -> None:
        self.task = task
        self.cards = cards
        self.defense = defense
        self._public = public
        self.runner = runner or EagerServer()
        self.device = self.runner.device
        self.state = State()
        self.given: Mapping[str, Tensor] = {}
        """The tensors that a call of `fit` gives to its loss, by name."""
        self.fits = 0  # calls of `fit` in this round
        self._optimizers: dict[str, Optimizer] = {}
        self.t = -1
        self.now: Mapping[str, float] = {}
        self.notes: dict[str, Any] = {}
        """Plain values that the method reports about the round. They go into its record and are cleared every round."""

    def begin(self, t: int, now: Mapping[str, float]) -> None:
        self.t, self.now, self.notes, self.fits = t, now, {}, 0
        for optimizer in self._optimizers.values():
            if optimizer.life == "round":
                optimizer.reset()

    @property
    def public(self) -> PublicRows:
        """The public rows of all clients, for a method with `Need.PUBLIC_AT_SERVER`.

        They are normalized as those of clients, in one way: where each client has a normalization of its own, so has
        the server, measured on these rows.
        """
        if self._public is None:
            raise UserCodeError("this server has no public rows: add Need.PUBLIC_AT_SERVER to the method's `needs`.")
        return self._public

    def draw(self, *key: draws.Key) -> torch.Generator:
        """A generator of the server's random numbers, keyed by round and `key`."""
        return draws.generator(self.task.seed, "server", self.t, *key)

    def make(self, key: draws.Key, build: Callable[[], Made]) -> Made:
        """Return `build()`, initialized with the numbers of `draw(key)` instead of torch's global ones."""
        with draws.seeded(self.task.seed, "server", self.t, key):
            return build()

    def defend(
        self, parts: Mapping[int, Mapping[str, Tensor]], start: Mapping[str, Tensor]
    ) -> dict[int, Mapping[str, Tensor]]:
        """Tensors of clients as the experiment's defense lets a server merge them; without a defense, as they are.

        Uploads are defended before they are passed to a method. A method that has to unpack them first calls this, and
        sets `defends_itself`. `start` has the tensors that clients started from.
        """
        return self.defense.of_tensors(parts, dict.fromkeys(parts, start))

    def optimize(self, name: str, of: nn.Module, rule: Rule, life: Life = "run") -> None:
        """Give a module of the state an optimizer, in `setup`, and move it to `server.device`.

        The optimizer's slots are part of the state and are saved. With `life="round"` every round resets them.
        """
        optimizer = Optimizer(Opt(of.to(self.device), rule, life=life), rule)
        setattr(self.state, f"{name}_optimiser", optimizer.slots())
        self._optimizers[name] = optimizer

    def descend(self, loss: Tensor, *opts: str) -> None:
        """Run one backward pass, then one step of each named optimizer."""
        chosen = [self._optimizers[name] for name in opts]
        parameters = [p for optimizer in chosen for p in optimizer.parameters.values()]
        grads: Sequence[Tensor | None] = torch.autograd.grad(loss, parameters, allow_unused=True)
        for optimizer in chosen:
            mine, grads = grads[: len(optimizer.parameters)], grads[len(optimizer.parameters) :]
            optimizer.apply(mine)

    def fit(
        self,
        loss: ServerLoss,
        x: Tensor,
        y: Tensor,
        *,
        opts: tuple[str, ...],
        batch: int,
        epochs: int = 1,
        steps: int | None = None,
        anneal: bool = False,
        shuffle: draws.Key | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Minimize `loss(server, batch)` over batches of rows x and labels y. Returns the last loss; NaN: no step.

        `opts` names the optimizers. `shuffle` is a key that draws the order of rows in each epoch; default: as they
        are. The last batch of an epoch may be smaller. `steps` sets a number of steps instead of epochs: then all
        batches have one size, which is that of x if `batch` is larger, and a batch may go on in the next epoch.
        `anneal` lets the learning rates fall along a cosine, to 0 after the last step. x, y and `given` are moved to
        `server.device`.

        On a GPU the step is recorded and replayed, also in later rounds, and a recording freezes Python numbers. So
        what changes between rounds and is neither in the batch nor in the state must be `given`: the loss reads such
        tensors as `server.given[name]`.
        """
        if steps is None:
            sizes = batch_sizes(len(x), batch, least=0) * epochs
        else:
            sizes = [min(batch, len(x))] * (steps if len(x) else 0)
            epochs = ceil(sum(sizes) / len(x)) if sizes else 0
        if not sizes:
            return torch.tensor(torch.nan)
        order = torch.cat([self._order(len(x), shuffle, epoch) for epoch in range(epochs)])[: sum(sizes)]
        shares = [(1 + cos(pi * number / len(sizes))) / 2 for number in range(len(sizes))] if anneal else None
        self.fits += 1
        tensors = {name: value.contiguous() for name, value in (given or {}).items()}
        fit = ServerFit(Descent(loss, opts), x.contiguous(), y.contiguous(), order, sizes, tensors, shares)
        try:
            with draws.seeded(self.task.seed, "server", self.t, "fit", self.fits, device=self.device):
                return self.runner.fit(self, fit)
        finally:
            if anneal:
                self.anneal(opts, 1.0)

    def anneal(self, opts: tuple[str, ...], share: float) -> None:
        """Set the learning rates of optimizers to this share of their rules'."""
        for name in opts:
            self._optimizers[name].anneal(share)

    def _order(self, rows: int, shuffle: draws.Key | None, epoch: int) -> Tensor:
        if shuffle is None:
            return torch.arange(rows)
        return torch.randperm(rows, generator=self.draw(shuffle, epoch))

    @contextmanager
    def reading(self, given: Mapping[str, Tensor]) -> Iterator[None]:
        """Let losses read these tensors as `server.given`."""
        self.given = given
        try:
            yield
        finally:
            self.given = {}

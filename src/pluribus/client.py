"""One party: its model, its private data, its private state, and the verbs a method trains it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pluribus import draws
from pluribus.data.federated import Data
from pluribus.message import Field, Inbox, Message, Rows, Schema, Value
from pluribus.models import Split
from pluribus.optim import Opt, Optimiser, Rule
from pluribus.state import State
from pluribus.task import Card, Task

SWEEP_BATCH = 256  # rows per forward pass where no gradient is needed
CHUNK = 2**22  # floats gathered at once: one gather serves many small batches, and memory stays small for large images


class Batch(NamedTuple):
    """Images, labels, their positions in the set, and the number of rows as a Python number."""

    x: Tensor
    y: Tensor
    i: Tensor
    n: int


Step = Callable[["Client", Batch], Tensor | None]


class Local(NamedTuple):
    """How clients train unless their method says otherwise."""

    rule: Rule
    epochs: int
    batch: int


class Client:
    """What a method sees of one party.

    `got` holds what came down and is kept, as tensors of fixed shape: all zero, with `held` all False, until the first
    message. `now` holds `Method.schedule` as 0-dim tensors; a step reads those, never the round number.
    """

    def __init__(self, card: Card, task: Task, model: Split, data: dict[str, Data], local: Local, device: torch.device):
        self.card = card
        self.task = task
        self.model = model.to(device)
        self.data = data
        self.local = local
        self.device = device
        self.state = State()
        self.got: dict[str, Value] = {}
        self.inbox: Inbox | None = None  # of a peer method
        self.frozen: tuple[str, ...] = ()  # names of tensors() that begin so never change and are not kept
        self.now: dict[str, Tensor] = {}
        self.optimisers: dict[str, Optimiser] = {}
        self._round = -1
        self._exchange: draws.Key = 0
        self._fits = 0
        self._in_step = False
        self._loss: Tensor | None = None

    # ---- set up by the site that hosts the client ------------------------------------------------------------------

    def equip(self, opts: Mapping[str, Opt], down: Schema) -> None:
        """Allocate optimisers and the buffers for what comes down, after `Method.prepare`."""
        self.state.to(self.device)
        self.optimisers = {name: Optimiser(opt, self.local.rule) for name, opt in opts.items()}
        self.got = {name: _empty(field, self.device) for name, field in down.items() if field.kept}

    def begin(self, t: int, exchange: draws.Key, now: Mapping[str, float]) -> None:
        """Start the work of one exchange."""
        self._round, self._exchange, self._fits, self._loss = t, exchange, 0, None
        for name, value in now.items():
            self.now.setdefault(name, torch.zeros((), device=self.device)).fill_(value)
        if exchange == 0 or isinstance(exchange, str):  # later exchanges of a round go on with its optimisers
            for optimiser in self.optimisers.values():
                if optimiser.life == "round":
                    optimiser.reset()

    def take(self, down: Message) -> None:
        """Copy a message into the buffers of `got`."""
        for name, buffer in self.got.items():
            if name not in down:
                continue
            if isinstance(buffer, Rows):
                rows = down.rows(name)
                buffer.value.copy_(rows.value)
                buffer.held.copy_(rows.held)
            else:
                buffer.copy_(down.tensor(name))

    def tensors(self) -> dict[str, Tensor]:
        """Everything the client must keep between rounds, live, by name."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"state.{name}": value for name, value in self.state.state_dict().items()}
        for name, value in self.got.items():
            if isinstance(value, Rows):
                found |= {f"got.{name}.value": value.value, f"got.{name}.held": value.held}
            else:
                found[f"got.{name}"] = value
        for key, optimiser in self.optimisers.items():
            if optimiser.life == "run":
                found |= {f"opt.{key}.{name}": value for name, value in optimiser.slots().items()}
        return (
            {name: value for name, value in found.items() if not name.startswith(self.frozen)} if self.frozen else found
        )

    def loss(self) -> float | None:
        """Mean training loss of the last fit of this exchange."""
        return None if self._loss is None else float(self._loss)

    # ---- what a method uses ----------------------------------------------------------------------------------------

    @property
    def t(self) -> int:
        """The round number. For `local_update`; inside a step it would be frozen into a captured graph."""
        if self._in_step:
            raise RuntimeError("client.t is not for steps: declare a schedule and read client.now")
        return self._round

    def draw(self, *key: draws.Key) -> torch.Generator:
        """Private randomness, by client, round, exchange and key."""
        return draws.generator(self.task.seed, "client", self.card.id, self._round, self._exchange, *key)

    def fit(
        self,
        step: Step,
        on: str | Data = "train",
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch: int | None = None,
    ) -> int:
        """Run a step over shuffled batches, for some epochs or exactly some steps; returns the number of steps.

        No sample is dropped: the last batch of an epoch is smaller, and a remainder of one joins its neighbour, because
        batch normalisation has no variance of one sample.
        """
        data = self.data[on] if isinstance(on, str) else on
        sizes = batch_sizes(len(data), batch or self.local.batch)
        limit = steps if steps is not None else len(sizes) * (self.local.epochs if epochs is None else epochs)
        self._fits += 1
        key = (self._round, self._exchange, self._fits)
        total = torch.zeros((), device=self.device)
        rows = done = 0
        with draws.seeded(self.task.seed, "dropout", self.card.id, *key, device=self.device), self._training(len(data)):
            while done < limit and sizes:
                order = torch.randperm(len(data), generator=self.draw("shuffle", self._fits, done))
                for one in _batches(data, order.to(self.device), sizes[: limit - done]):
                    loss = step(self, one)
                    done += 1
                    if loss is not None:
                        total += loss.detach() * one.n
                        rows += one.n
        self._loss = total / rows if rows else None
        return done

    @contextmanager
    def _training(self, samples: int) -> Iterator[None]:
        """Train mode, except that a client with one sample normalises by its running statistics."""
        for module in (self.model, self.state):
            module.train(samples > 1)
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def sweep(self, visit: Callable[[Client, Batch], None], on: str | Data = "train") -> None:
        """Show every sample once, in order, in eval mode and without gradients; `visit` adds up what it needs."""
        data = self.data[on] if isinstance(on, str) else on
        for module in (self.model, self.state):
            module.eval()
        order = torch.arange(len(data), device=self.device)
        full, rest = divmod(len(data), SWEEP_BATCH)
        sizes = [SWEEP_BATCH] * full + [rest] * (rest > 0)
        with torch.no_grad():
            for one in _batches(data, order, sizes):
                visit(self, one)

    def features(self, x: Tensor) -> Tensor:
        """phi(x), brought to the task's width."""
        return self.model.features(x)  # type: ignore[no-any-return]

    def parameters(self, opt: str = "model") -> dict[str, nn.Parameter]:
        """An optimiser's parameters, live, by name."""
        return self.optimisers[opt].parameters

    def call(self, x: Tensor, parameters: Mapping[str, Tensor], part: str = "") -> Tensor:
        """Forward through the model, or a `part` of it, with other parameters (by their names in the model).

        A pure function, for gradients of gradients: batch-norm statistics stay as they are, and every call within one
        exchange drops out the same units.
        """
        module = self.model.get_submodule(part)
        prefix = f"{part}." if part else ""
        given = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        key = (self.task.seed, "call", self.card.id, self._round, self._exchange)
        with draws.seeded(*key, device=self.device):
            return functional_call(module, {**given, **buffers}, (x,))  # type: ignore[no-any-return]

    def grads(self, loss: Tensor, opt: str = "model") -> dict[str, Tensor]:
        """Gradients of a loss for an optimiser's parameters, by name; unused ones are left out."""
        parameters = self.optimisers[opt].parameters
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}

    def apply(self, grads: Mapping[str, Tensor], opt: str = "model") -> None:
        """One optimiser step with these gradients."""
        optimiser = self.optimisers[opt]
        optimiser.apply([grads.get(name) for name in optimiser.parameters])

    def descend(self, loss: Tensor, *opts: str) -> None:
        """One backward pass, then one step of each named optimiser (`model` if none is named)."""
        chosen = [self.optimisers[name] for name in opts or ("model",)]
        parameters = [p for optimiser in chosen for p in optimiser.parameters.values()]
        grads: Sequence[Tensor | None] = torch.autograd.grad(loss, parameters, allow_unused=True)
        for optimiser in chosen:
            mine, grads = grads[: len(optimiser.parameters)], grads[len(optimiser.parameters) :]
            optimiser.apply(mine)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Try something and leave no trace: all tensors are restored in place on exit."""
        live = self.tensors()
        saved = {name: value.clone() for name, value in live.items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in live.items():
                    value.copy_(saved[name])


def batch_sizes(samples: int, batch: int) -> list[int]:
    """Sizes of the batches of one epoch.

    >>> batch_sizes(25, 10), batch_sizes(21, 10), batch_sizes(1, 10), batch_sizes(0, 10)
    ([10, 10, 5], [10, 11], [1], [])
    """
    full, rest = divmod(samples, batch)
    sizes = [batch] * full + ([rest] if rest else [])
    if rest == 1 and full:
        sizes[-2:] = [batch + 1]
    return sizes


def _batches(data: Data, order: Tensor, sizes: list[int]) -> Iterator[Batch]:
    """Batches of these sizes, gathered from the store many at a time."""
    if not sizes:
        return
    chunk = max(1, CHUNK // (data.store.x[0].numel() * max(sizes)))
    start = 0
    for first in range(0, len(sizes), chunk):
        group = sizes[first : first + chunk]
        positions = order[start : start + sum(group)]
        start += len(positions)
        x, y = data.take(positions)
        for bx, by, bi in zip(*(torch.split(part, group) for part in (x, y, positions)), strict=True):
            yield Batch(bx, by, bi, len(bi))


def _empty(field: Field, device: torch.device) -> Value:
    shape = [size for size in field.shape if isinstance(size, int)]
    if len(shape) != len(field.shape):
        raise TypeError("a field of run-time size cannot be kept: declare it with kept=False and use it in receive()")
    value = torch.zeros(shape, dtype=field.dtype, device=device)
    return Rows(value, torch.zeros(shape[0], dtype=torch.bool, device=device)) if field.form == "rows" else value


def trainable(module: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)

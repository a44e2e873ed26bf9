"""One party: its model, its private data, its private state, and the verbs a method trains it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pluribus import draws
from pluribus.data.augment import Augment
from pluribus.data.federated import Data as Data
from pluribus.data.federated import ExamSets
from pluribus.draws import Made
from pluribus.internal.batches import Batch, batch_sizes
from pluribus.internal.snapshot import Snapshot
from pluribus.internal.state import State as State
from pluribus.internal.steps import Descent, Eager, Fit, Loss, Map, Runner, Step
from pluribus.message import Field, Inbox, Kept, Message, Rows, Schema, Value
from pluribus.models import TwoPartModel
from pluribus.models.dropout import set_keys, with_keys
from pluribus.optim import Life, Opt, Optimiser, Rule
from pluribus.task import Card, Task

OPTIMISERS = "opt."  # how the names of their slots begin

__all__ = ["Batch", "Client", "Local", "Step", "batch_sizes", "trainable"]


class Local(NamedTuple):
    """How clients train unless their method says otherwise, and in which arithmetic."""

    rule: Rule
    epochs: int
    batch: int
    bfloat16: bool = False
    channels_last: bool = False
    life: Life = "round"  # of optimisers whose method does not say
    augment: tuple[str, ...] = ()


class Client:
    """What a method sees of one party.

    `got` holds what came down and is kept, as tensors of fixed shape: all zero, with `held` all False, until the first
    message. `now` holds `Method.schedule` as 0-dim tensors; a step reads those, never the round number. `data` holds
    the client's own sets. All clients know `public`, the public sets by owner, and `exams`, the val and test sets per
    domain.
    """

    def __init__(
        self,
        card: Card,
        task: Task,
        model: TwoPartModel,
        data: dict[str, Data],
        local: Local,
        device: torch.device,
        *,
        public: Mapping[int, Data] = MappingProxyType({}),
        exams: ExamSets = MappingProxyType({}),
    ):
        self.card = card
        self.task = task
        self.model = with_keys(model).to(device)
        self.data = data
        self.public = public
        self.exams = exams
        self.local = local
        self.device = device
        self.state = State()
        self.got = Kept()
        self.inbox: Inbox | None = None  # of a peer method
        self.frozen: tuple[str, ...] = ()  # names of tensors() that begin so never change and are not kept
        self.now: dict[str, Tensor] = {}
        self.optimisers: dict[str, Optimiser] = {}
        self._tensors: dict[str, Tensor] | None = None
        self.runner: Runner = Eager()
        self._round = -1
        self._exchange: draws.Key = 0
        self._fits = 0
        self._in_step = False
        self._mode: bool | None = None
        self._least = 2
        self._loss: Tensor | None = None
        self.steps = 0  # of this exchange, in all fits

    # ---- set up by the host that hosts the client ------------------------------------------------------------------

    def equip(self, opts: Mapping[str, Opt], down: Schema, least: int = 2) -> None:
        """Allocate optimisers and the buffers for what comes down, after `Method.prepare`.

        `least` rows are what a batch needs.
        """
        self._least = least
        with_keys(self.state).to(self.device)
        if self.local.channels_last:
            for module in (self.model, self.state):
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimisers = {name: Optimiser(opt, self.local.rule, self.local.life) for name, opt in opts.items()}
        self.got = Kept({name: _empty(field, self.device) for name, field in down.items() if field.kept})

    def take_over(self, card: Card, data: dict[str, Data]) -> None:
        """Become another client of the same architecture, but for its tensors."""
        self.card, self.data = card, data

    def begin(self, t: int, exchange: draws.Key, now: Mapping[str, float]) -> None:
        """Start the work of one exchange."""
        self._round, self._exchange, self._fits, self._loss, self.steps = t, exchange, 0, None, 0
        self.inbox = None
        trained = max(t - self.task.warmup, 0)  # rounds of training so far, by which the learning rate decays
        for name, value in {"lr": self.local.rule.rate(trained), **now}.items():
            kind = torch.float64 if name == "lr" else torch.float32
            self.now.setdefault(name, torch.zeros((), dtype=kind, device=self.device)).fill_(value)
        for optimiser in self.optimisers.values():
            optimiser.begin(trained)
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
        if self._tensors is None or not self.state.fixed:
            self._tensors = self._kept_tensors()
        return self._tensors

    def _kept_tensors(self) -> dict[str, Tensor]:
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        found |= {f"state.{name}": value for name, value in self.state.state_dict().items()}
        for name, value in self.got.items():
            if isinstance(value, Rows):
                found |= {f"got.{name}.value": value.value, f"got.{name}.held": value.held}
            else:
                found[f"got.{name}"] = value
        for key, optimiser in self.optimisers.items():
            if optimiser.life == "run":
                found |= {f"{OPTIMISERS}{key}.{name}": value for name, value in optimiser.slots().items()}
        return (
            {name: value for name, value in found.items() if not name.startswith(self.frozen)} if self.frozen else found
        )

    def measured(self) -> dict[str, Tensor]:
        """What its predictions depend on, live, by name: all that it keeps but for its optimisers."""
        return {name: value for name, value in self.tensors().items() if not name.startswith(OPTIMISERS)}

    def loss(self) -> float | None:
        """Mean training loss of the last fit of this exchange whose steps gave one."""
        return None if self._loss is None else float(self._loss)

    # ---- what a method uses ----------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The round number, for engines."""
        return self._round

    @property
    def t(self) -> int:
        """The round number. For `local_update`; inside a step it would be frozen into a captured graph."""
        if self._in_step:
            raise RuntimeError("client.t is not for steps: declare a schedule and read client.now")
        return self._round

    def draw(self, *key: draws.Key) -> torch.Generator:
        """Private randomness, by client, round, exchange and key."""
        return draws.generator(*self._key(*key))

    def make(self, key: draws.Key, build: Callable[[], Made]) -> Made:
        """What `build` makes, initialized by the numbers of `draw(key)` in place of torch's global ones."""
        with draws.seeded(*self._key(key)):
            return build()

    def _key(self, *key: draws.Key) -> tuple[draws.Key, ...]:
        return (self.task.seed, "client", self.card.id, self._round, self._exchange, *key)

    def fit(
        self,
        step: Step | Loss,
        on: str | Data = "train",
        *,
        opts: tuple[str, ...] = (),
        epochs: int | None = None,
        steps: int | None = None,
        batch: int | None = None,
        augment: bool = True,
    ) -> int:
        """Run a step over shuffled batches, for some epochs or exactly some steps; returns the number of steps.

        With `opts`, the names of some optimizers, the function is a loss, and these optimizers descend it. Without,
        it is a whole step: it moves weights itself, and returns the loss to be logged.

        No sample is dropped: the last batch of an epoch is smaller, and a remainder too small to learn from (of one, or
        of up to seven where single pixels are normalised) joins its neighbour. Images are augmented as the experiment
        says; `augment=False` leaves them as they are, for lessons on public images that others see too.
        """
        if opts:
            step = Descent(step, opts)  # type: ignore[arg-type]  # a loss always gives a number
        data = self.data[on] if isinstance(on, str) else on
        epoch = batch_sizes(len(data), batch or self.local.batch, self._least)
        limit = steps if steps is not None else len(epoch) * (self.local.epochs if epochs is None else epochs)
        self._fits += 1
        orders: list[Tensor] = []
        sizes: list[int] = []
        while len(sizes) < limit and epoch:
            orders.append(torch.randperm(len(data), generator=self.draw("shuffle", self._fits, len(sizes))))
            sizes += epoch[: limit - len(sizes)]
        if not sizes:
            self._loss = None
            return 0
        key = (self.task.seed, "dropout", self.card.id, self._round, self._exchange, self._fits)
        names = self.local.augment if augment else ()
        changes = Augment.of(names, draws.number(*key, "augment"), sum(sizes), self.device)
        with self._training(len(data)):
            for part, module in (("model", self.model), ("state", self.state)):
                set_keys(module, draws.number(*key, part))
            loss = self.runner.fit(self, Fit(step, data, torch.cat(orders), sizes, key, changes))
        if loss is not None:
            self._loss = loss
        self.steps += len(sizes)
        return len(sizes)

    @contextmanager
    def _training(self, samples: int) -> Iterator[None]:
        """Train mode, except that a client with too few samples normalises by its running statistics."""
        self._set_mode(samples >= self._least)
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _set_mode(self, training: bool) -> None:
        """Train or eval mode, of hundreds of modules only where it changes."""
        if training != self._mode:
            self._mode = training
            for module in (self.model, self.state):
                module.train(training)

    def sweep(self, rows: Map, on: str | Data = "train") -> Tensor:
        """`rows(client, x)` of every sample, in order, in eval mode and without gradients, as one tensor.

        `rows` is a function or a method with a name, such as `Client.features`: a lambda would be a new one every time.
        """
        data = self.data[on] if isinstance(on, str) else on
        self._set_mode(False)
        if not len(data):
            with torch.no_grad():
                return rows(self, torch.zeros(1, *self.task.shape, device=self.device))[:0]
        return self.runner.sweep(self, rows, data)

    def autocast(self) -> torch.autocast:
        """The arithmetic of training: bfloat16 where the experiment asks for it."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.local.bfloat16, cache_enabled=False)

    def features(self, x: Tensor) -> Tensor:
        """phi(x), brought to the task's width."""
        return self.model.features(x)  # type: ignore[no-any-return]

    def parameters(self, opt: str = "model") -> dict[str, nn.Parameter]:
        """An optimiser's parameters, live, by name."""
        return self.optimisers[opt].parameters

    def trained_size(self) -> int:
        """How many numbers its optimisers move."""
        moved = {id(p): p.numel() for optimiser in self.optimisers.values() for p in optimiser.parameters.values()}
        return sum(moved.values())

    def call(self, x: Tensor, parameters: Mapping[str, Tensor], part: str = "") -> Tensor:
        """Forward through the model, or a `part` of it, with other parameters (by their names in the model).

        A pure function, for gradients of gradients: batch-norm statistics stay as they are, and all calls of one step
        drop out the same units.
        """
        module = self.model.get_submodule(part)
        prefix = f"{part}." if part else ""
        given = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        buffers = {name: value.clone() for name, value in module.named_buffers()}
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
        saved = Snapshot(live)
        try:
            yield
        finally:
            saved.put_back(live)


def _empty(field: Field, device: torch.device) -> Value:
    shape = [size for size in field.shape if isinstance(size, int)]
    if len(shape) != len(field.shape):
        raise TypeError("a field of run-time size cannot be kept: declare it with kept=False and use it in receive()")
    value = torch.zeros(shape, dtype=field.dtype, device=device)
    return Rows(value, torch.zeros(shape[0], dtype=torch.bool, device=device)) if field.form == "rows" else value


def trainable(module: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)

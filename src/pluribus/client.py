"""A client: its model, its private data, its private state, and the verbs that a method trains it with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pluribus import draws
from pluribus.data.augment import Augment
from pluribus.data.federated import Data as Data
from pluribus.data.federated import ExamSets
from pluribus.draws import Made
from pluribus.internal.batches import Batch, batch_sizes
from pluribus.internal.devices import is_apple, move_module
from pluribus.internal.guard import Guard, Tape
from pluribus.internal.snapshot import Packed, Snapshot, pack
from pluribus.internal.state import State as State
from pluribus.internal.steps import Descent, Eager, Finish, Fit, Loss, Map, Runner, Step
from pluribus.message import Field, Inbox, Kept, Message, Rows, Schema, Value
from pluribus.models import TwoPartModel
from pluribus.models.depthwise import keep_planar
from pluribus.models.dropout import replace_dropout, set_dropout_keys
from pluribus.models.layers import recurrent
from pluribus.optim import Life, Opt, Optimizer, Rule
from pluribus.privacy.terms import Terms
from pluribus.targets import Reduction
from pluribus.task import Card, Task

# Prefixes of the names of optimizer slots: those that outlive a round, and those that outlive an exchange.
OPTIMIZERS = "opt."
MOMENTA = "momenta."

__all__ = ["Batch", "Client", "Local", "Step", "batch_sizes", "trainable"]


class Local(NamedTuple):
    """How clients train unless their method overrides it, and in which arithmetic."""

    rule: Rule
    epochs: int
    batch: int
    bfloat16: bool = False
    channels_last: bool = False
    life: Life = "round"  # of optimizers for which the method sets none
    augment: tuple[str, ...] = ()
    class_weights: Literal["equal", "balanced"] = "equal"
    privacy: Terms | None = None  # None: nothing is bounded


class Sets(NamedTuple):
    """The sets of a client: its own, the public ones by owner, and those of the domains."""

    data: dict[str, Data]
    public: Mapping[int, Data]
    exams: ExamSets


@dataclass(eq=False, repr=False)
class Client:
    """What a method sees of one client.

    `got` holds the kept fields of downloads as tensors of fixed shape: all zero, with `held` all False, until the first
    message. `now` holds the values of `Method.schedule` as 0-dim tensors; a step reads those, never the round number.
    `data` holds the client's own sets. All clients share `public`, the public sets by owner, and `exams`, the
    validation and test sets per domain.
    """

    card: Card
    task: Task
    model: TwoPartModel
    data: dict[str, Data]
    local: Local
    device: torch.device
    _: KW_ONLY
    public: Mapping[int, Data] = field(default_factory=dict)
    exams: ExamSets = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = replace_dropout(self.model).to(self.device)
        self.state = State()
        self.got = Kept()
        self.inbox: Inbox | None = None  # for peer methods
        self.frozen: tuple[str, ...] = ()  # prefixes of tensors that never change and are not saved
        self.now: dict[str, Tensor] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self._tensors: dict[str, Tensor] | None = None
        self._packed: Packed | None = None
        self._predicted: Packed | None = None
        self.runner: Runner = Eager()
        self.guard: Guard | None = None  # of a private run
        self.tape: Tape | None = None  # while the gradients of single rows are computed
        self.row_sums: dict[Any, Any] = {}  # buffers of private steps
        self._round = -1
        self._exchange: draws.Key = 0
        self._fits = 0
        self._in_step = False
        self._mode: bool | None = None
        self._least = 2
        self._loss: Tensor | None = None
        self.steps = 0  # in all fits of this exchange
        self.class_weight = self._balance()  # of each class or label in the loss

    # ---- what the host calls -----------------------------------------------------------------------------------------

    def equip(self, opts: Mapping[str, Opt], down: Schema, least: int = 2) -> None:
        """Allocate optimizers and buffers for downloads, after `Method.prepare`. `least`: fewest rows in a batch."""
        self._least = least
        move_module(replace_dropout(self.state), self.device)
        if self.local.channels_last:
            for module in (self.model, self.state):
                module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                if self.device.type == "cuda":
                    keep_planar(module)
        self.optimizers = {name: Optimizer(opt, self.local.rule, self.local.life) for name, opt in opts.items()}
        self.got = Kept({name: _empty_buffer(field, self.device) for name, field in down.items() if field.kept})

    def sets(self) -> Sets:
        """All sets, as this client normalizes them."""
        return Sets(self.data, self.public, self.exams)

    def take_over(self, card: Card, sets: Sets) -> None:
        """Become another client of the same architecture. The caller restores the tensors."""
        self.card = card
        self.data, self.public, self.exams = sets
        if self.class_weight is not None and (weight := self._balance()) is not None:
            self.class_weight.copy_(weight)  # in place, because captured steps read it there

    def _balance(self) -> Tensor | None:
        """Weights by which every class, or the two sides of every label, count equally. None: every row does.

        A class without training rows has the weight 1: no row of it is seen.
        """
        if self.local.class_weights == "equal" or self.task.target.kind == "numbers":
            return None
        y, classes = self.data["train"].labels(), self.task.classes
        if self.task.target.kind == "labels":
            held = y.sum(0)
            return torch.where((held > 0) & (held < len(y)), (len(y) - held) / held.clamp(min=1), 1.0)
        held = (y[:, None] == torch.arange(classes, device=y.device)).sum(0)
        return torch.where(held > 0, len(y) / ((held > 0).sum() * held.clamp(min=1)), 1.0).float()

    def begin(self, t: int, exchange: draws.Key, now: Mapping[str, float]) -> None:
        """Start the work of one exchange."""
        self._round, self._exchange, self._fits, self._loss, self.steps = t, exchange, 0, None, 0
        self.inbox = None
        for name, value in {"lr": self.local.rule.rate(self.trained), **now}.items():
            kind = torch.float64 if name == "lr" and not is_apple(self.device) else torch.float32
            self.now.setdefault(name, torch.zeros((), dtype=kind, device=self.device)).fill_(value)
        for optimizer in self.optimizers.values():
            optimizer.begin(self.trained)
        if exchange == 0 or isinstance(exchange, str):  # later exchanges of a round keep its optimizers
            for optimizer in self.optimizers.values():
                if optimizer.life == "round":
                    optimizer.reset()

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

    def pack(self) -> None:
        """Move all tensors that outlive an exchange into common blocks of memory, where copies of them are cheap.

        Called once, after `equip` and before any step is recorded: addresses change. Recurrent layers already have a
        block for their weights, and keep it.
        """
        if recurrent(self.model) or recurrent(self.state):
            return
        kept = self._named_tensors()
        predicting = sum(not name.startswith(OPTIMIZERS) for name in kept)
        self._packed = pack({**kept, **self._momenta()})
        if self._packed is not None:
            self._tensors, self._predicted = self._packed.first(len(kept)), self._packed.first(predicting)

    def tensors(self) -> dict[str, Tensor]:
        """The live tensors that the client keeps between rounds, by name."""
        if self._tensors is None or not self.state.fixed:
            self._tensors = {name: value.detach() for name, value in self._named_tensors().items()}
        return self._tensors

    def prediction_tensors(self) -> dict[str, Tensor]:
        """The live tensors that predictions depend on, by name: all of `tensors()` except the optimizers'."""
        if self._predicted is not None:
            return self._predicted
        return {name: value for name, value in self.tensors().items() if not name.startswith(OPTIMIZERS)}

    def all_tensors(self) -> dict[str, Tensor]:
        """The live tensors that outlive a round or an exchange: another exchange of the same round may follow."""
        return self._packed if self._packed is not None else self.tensors() | self._momenta()

    def _named_tensors(self) -> dict[str, Tensor]:
        """The parameters, buffers and slots behind `tensors()`, those of optimizers last."""
        found = {f"model.{name}": value for name, value in self.model.state_dict(keep_vars=True).items()}
        found |= {f"state.{name}": value for name, value in self.state.state_dict(keep_vars=True).items()}
        for name, value in self.got.items():
            if isinstance(value, Rows):
                found |= {f"got.{name}.value": value.value, f"got.{name}.held": value.held}
            else:
                found[f"got.{name}"] = value
        found |= self._slots("run", OPTIMIZERS)
        return {name: value for name, value in found.items() if not name.startswith(self.frozen)}

    def _momenta(self) -> dict[str, Tensor]:
        return self._slots("round", MOMENTA)

    def _slots(self, life: Life, prefix: str) -> dict[str, Tensor]:
        chosen = {key: one for key, one in self.optimizers.items() if one.life == life}
        return {f"{prefix}{key}.{name}": slot for key, one in chosen.items() for name, slot in one.slots().items()}

    def loss(self) -> float | None:
        """Mean training loss of the last fit of this exchange whose steps returned one."""
        return None if self._loss is None else float(self._loss)

    # ---- what a method uses ----------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        return self._round  # for engines, which may read it in a step

    @property
    def trained(self) -> int:
        """Rounds of training before this one, which decide the learning rate. Rounds of a method's warm-up are none."""
        return max(self._round - self.task.warmup, 0)

    @property
    def t(self) -> int:
        """The round number, for `local_update`. A captured step would freeze it, so a step must not read it."""
        if self._in_step:
            raise RuntimeError("a step must not read client.t: declare a schedule and read client.now")
        return self._round

    def draw(self, *key: draws.Key) -> torch.Generator:
        """A generator of private random numbers, keyed by client, round, exchange and `key`."""
        return draws.generator(*self._key(*key))

    def make(self, key: draws.Key, build: Callable[[], Made]) -> Made:
        """Return `build()`, initialized with the numbers of `draw(key)` instead of torch's global ones."""
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
        """Run a step over shuffled batches, for some epochs or an exact number of steps. Returns the number of steps.

        With `opts`, the names of optimizers, the function is a loss that these optimizers minimize. Without `opts`, it
        is a whole step: it updates the weights itself and returns the loss for the log.

        No sample is dropped: the last batch of an epoch is smaller. A last batch that is too small to learn from (one
        sample, or up to seven where single pixels are normalized) is merged with the one before. Images are augmented
        as configured; `augment=False` leaves them unchanged, for public images that other clients see too.
        """
        if opts:
            step = Descent(step, opts)  # type: ignore[arg-type]  # a loss always returns a number
        data = self.data[on] if isinstance(on, str) else on
        epoch = batch_sizes(len(data), batch or self.local.batch, self._least)
        limit = steps if steps is not None else len(epoch) * (self.local.epochs if epochs is None else epochs)
        self._fits += 1
        if self.guard is not None and limit and epoch and self.guard.protects(self, data):
            self.guard.fit(self, step, data, batch or self.local.batch, limit, augment)
            self.steps += limit
            return limit
        orders: list[Tensor] = []
        sizes: list[int] = []
        while len(sizes) < limit and epoch:
            orders.append(torch.randperm(len(data), generator=self.draw("shuffle", self._fits, len(sizes))))
            sizes += epoch[: limit - len(sizes)]
        if not sizes:
            self._loss = None
            return 0
        loss = self.visit(step, data, torch.cat(orders), sizes, augment)
        if loss is not None:
            self._loss = loss
        self.steps += len(sizes)
        return len(sizes)

    def visit(
        self,
        step: Step,
        data: Data,
        order: Tensor,
        sizes: list[int],
        augment: bool,
        finish: Finish | None = None,
    ) -> Tensor | None:
        """Run a step over these positions, batch by batch. Returns the mean loss."""
        key = (self.task.seed, "dropout", self.card.id, self._round, self._exchange, self._fits)
        names = self.local.augment if augment else ()
        changes = Augment.of(names, draws.number(*key, "augment"), sum(sizes), self.device)
        with self._training(len(data)):
            for part, module in (("model", self.model), ("state", self.state)):
                set_dropout_keys(module, draws.number(*key, part))
            return self.runner.fit(self, Fit(step, data, order, sizes, key, changes, finish))

    @contextmanager
    def _training(self, samples: int) -> Iterator[None]:
        """Train mode. With too few samples, running statistics normalize."""
        self.set_mode(samples >= self._least)
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def set_mode(self, training: bool) -> None:
        """Set train or eval mode. Hundreds of modules are visited only if the mode changes."""
        if training != self._mode:
            self._mode = training
            for module in (self.model, self.state):
                module.train(training)

    @property
    def fits(self) -> int:
        """Number of fits of this exchange so far."""
        return self._fits

    def sweep(self, rows: Map, on: str | Data = "train") -> Tensor:
        """Return `rows(client, x)` of all samples in order, in eval mode and without gradients, as one tensor.

        `rows` is a named function or method, such as `Client.features`: a lambda would be a new function every time.
        """
        data = self.data[on] if isinstance(on, str) else on
        self.set_mode(False)
        if not len(data):
            with torch.no_grad():
                return rows(self, self.task.input.zeros(1, device=self.device))[:0]
        return self.runner.sweep(self, rows, data)

    def autocast(self) -> torch.autocast:
        """The arithmetic of training: bfloat16 if the experiment sets it."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.local.bfloat16, cache_enabled=False)

    def task_loss(self, scores: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """The loss of the task: cross-entropy for classes and labels, a distance for numbers.

        With `reduction="none"`, one number per row.
        """
        return self.task.target.loss(scores, y, weight=self.class_weight, reduction=reduction)

    def features(self, x: Tensor) -> Tensor:
        """The features phi(x), in the task's width."""
        return self.model.features(x)  # type: ignore[no-any-return]

    def parameters(self, opt: str = "model") -> dict[str, nn.Parameter]:
        """The live parameters of an optimizer, by name."""
        return self.optimizers[opt].parameters

    def trained_size(self) -> int:
        """Number of weights that the optimizers update."""
        moved = {p for optimizer in self.optimizers.values() for p in optimizer.parameters.values()}
        return sum(p.numel() for p in moved)

    def call(self, x: Tensor, parameters: Mapping[str, Tensor], part: str = "") -> Tensor:
        """Run the model, or a `part` of it, with other parameters (by their names in the model).

        A pure function, for gradients of gradients: batch-norm statistics do not change, and all calls of one step drop
        out the same units.
        """
        module = self.model.get_submodule(part)
        prefix = f"{part}." if part else ""
        given = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        return functional_call(module, {**given, **buffers}, (x,))  # type: ignore[no-any-return]

    def grads(self, loss: Tensor, opt: str = "model") -> dict[str, Tensor]:
        """Gradients of a loss for an optimizer's parameters, by name. Unused parameters are left out."""
        if self.tape is not None:
            return self.tape.grads(loss, opt)
        parameters = self.optimizers[opt].parameters
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}

    def apply(self, grads: Mapping[str, Tensor], opt: str = "model") -> None:
        """Take one optimizer step with these gradients."""
        if self.tape is not None:
            self.tape.apply(grads, opt)
            return
        optimizer = self.optimizers[opt]
        optimizer.apply([grads.get(name) for name in optimizer.parameters])

    def descend(self, loss: Tensor, *opts: str) -> None:
        """Run one backward pass, then one step of each named optimizer (`model` if none is named)."""
        if self.tape is not None:
            self.tape.descend(loss, opts or ("model",))
            return
        chosen = [self.optimizers[name] for name in opts or ("model",)]
        parameters = [p for optimizer in chosen for p in optimizer.parameters.values()]
        grads: Sequence[Tensor | None] = torch.autograd.grad(loss, parameters, allow_unused=True)
        for optimizer in chosen:
            mine, grads = grads[: len(optimizer.parameters)], grads[len(optimizer.parameters) :]
            optimizer.apply(mine)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Restore all tensors in place on exit, so that changes inside the block leave no trace."""
        live = self.tensors()
        saved = Snapshot(live)
        try:
            yield
        finally:
            saved.put_back(live)


def _empty_buffer(field: Field, device: torch.device) -> Value:
    shape = [size for size in field.shape if isinstance(size, int)]
    if len(shape) != len(field.shape):
        raise TypeError("a field of run-time size cannot be kept: declare it with kept=False and read it in receive()")
    value = torch.zeros(shape, dtype=field.dtype, device=device)
    return Rows(value, torch.zeros(shape[0], dtype=torch.bool, device=device)) if field.form == "rows" else value


def trainable(module: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)

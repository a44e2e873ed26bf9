"""Gradients of single rows, clipped and summed: one pure tensor program, which a GPU records like any step.

The step of a method runs on batches of one row under `torch.func.vmap`. Where it calls `client.descend` or
`client.grads`, a tape notes the loss instead. So every step that descends a loss is private without a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pluribus.client import Client
from pluribus.errors import MismatchError
from pluribus.internal.batches import Batch
from pluribus.internal.guard import Tape
from pluribus.internal.steps import Descent, RowStep, Step
from pluribus.internal.substitute import substitute
from pluribus.method import Method
from pluribus.models.dropout import Dropout
from pluribus.ops import Tally
from pluribus.privacy.layers import Factors, Layers

ROW_STRIDE = 1 << 40  # between the dropout keys of two rows


class Noted:
    """A tape that notes the loss of a step on one row. Nothing changes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.loss: Tensor | None = None
        self.opts: tuple[str, ...] = ()
        self.takes_gradients = False

    def descend(self, loss: Tensor, opts: tuple[str, ...]) -> None:
        self._note(loss, opts)

    def grads(self, loss: Tensor, opt: str) -> dict[str, Tensor]:
        self._note(loss, (opt,))
        self.takes_gradients = True
        return {name: torch.zeros_like(p) for name, p in self._client.optimizers[opt].parameters.items()}

    def apply(self, grads: Mapping[str, Tensor], opt: str) -> None:
        pass

    def _note(self, loss: Tensor, opts: tuple[str, ...]) -> None:
        if self.loss is not None:
            raise MismatchError("a step takes two gradients, and a private step can bound only one of them.")
        self.loss, self.opts = loss, opts


class Given:
    """A tape with the private gradient of a step, which the step reads in place of its own."""

    def __init__(self, client: Client, gradients: Mapping[int, Tensor]) -> None:
        self._client, self._gradients = client, gradients

    def descend(self, loss: Tensor, opts: tuple[str, ...]) -> None:
        raise MismatchError("a step takes gradients and descends a loss, too: a private step can bound only one.")

    def grads(self, loss: Tensor, opt: str) -> dict[str, Tensor]:
        parameters = self._client.optimizers[opt].parameters.items()
        return {name: self._gradients[id(p)] for name, p in parameters if id(p) in self._gradients}

    def apply(self, grads: Mapping[str, Tensor], opt: str) -> None:
        with record(self._client, None):
            self._client.apply(grads, opt)


@contextmanager
def record(client: Client, tape: Tape | None) -> Iterator[None]:
    """Let a tape take the place of the client's optimizers."""
    before, client.tape = client.tape, tape
    try:
        yield
    finally:
        client.tape = before


def optimizers_of(client: Client, step: Step) -> tuple[str, ...]:
    """The optimizers that a step may use: those that it names, or all."""
    if isinstance(step, Descent):
        return step.opts
    if getattr(step, "__func__", None) is Method.step:
        return ("model",)
    return tuple(client.optimizers)


class Whole(NamedTuple):
    """The gradient of a weight for each row (rows, ...)."""

    value: Tensor

    def squared_norms(self) -> Tensor:
        return self.value.flatten(1).square().sum(1)

    def gradients(self) -> Tensor:
        return self.value

    def sum(self, factors: Tensor) -> Tensor:
        return factors @ self.value.flatten(1)


class RowSums:
    """The sum of clipped gradients of one batch, and the noise that is added to it, in buffers of fixed addresses.

    It belongs to a place in memory and a step, as a recording does; the client in that place fills in its numbers.
    """

    def __init__(self, client: Client, opts: Sequence[str]) -> None:
        parameters = [p for opt in opts for p in client.optimizers[opt].parameters.values()]
        self.parameters: list[nn.Parameter] = list({id(p): p for p in parameters}.values())
        self._sizes = [p.numel() for p in self.parameters]
        device = client.device
        self.total = torch.zeros(sum(self._sizes), device=device)
        self.noise = torch.zeros_like(self.total)
        self.clip, self.deviation, self.batch = (torch.ones((), device=device) for _ in range(3))
        self._paths = _paths(client, self.parameters)
        self.opts: tuple[str, ...] = ()  # that the step uses, known when it has run once
        self.takes_gradients = False

    def start(self, clip: float, noise: float, batch: int) -> None:
        """Set the bound, the noise and the expected size of a batch."""
        self.total.zero_()
        self.clip.fill_(clip)
        self.deviation.fill_(noise * clip if noise else 0.0)
        self.batch.fill_(batch)

    def add(self, client: Client, step: Step, batch: Batch) -> None:
        """Add the clipped gradients of the rows of a chunk. Padded rows count nothing."""
        gradients = self.row_gradients(client, step, batch)
        used = {id(p) for opt in self.opts for p in client.optimizers[opt].parameters.values()}
        with torch.no_grad():
            pairs = zip(gradients, self.parameters, torch.split(self.total, self._sizes), strict=True)
            mine = _joined([(g, [part]) for g, p, part in pairs if id(p) in used])
            norms = torch.stack([g.squared_norms() for g, _ in mine]).sum(0).sqrt()
            factors = clip_factors(norms, self.clip) * (batch.i >= 0)
            sums = [torch.split(g.sum(factors).flatten(), [len(part) for part in parts]) for g, parts in mine]
            torch._foreach_add_([part for _, parts in mine for part in parts], [one for some in sums for one in some])

    def row_gradients(self, client: Client, step: Step, batch: Batch) -> list[Factors | Whole]:
        """The gradients of each row by itself, in the order of `parameters`."""
        buffers = _buffers(client)
        keys = {name: buffers.pop(name) for name in _dropout_keys(client)}
        rows = torch.arange(batch.n, device=client.device) * ROW_STRIDE
        by_row = {name: key + rows for name, key in keys.items()}
        layers = Layers()

        def loss(values: list[Tensor], keys: dict[str, Tensor], x: Tensor, y: Tensor, i: Tensor) -> Tensor:
            layers.watch(values)
            given = {path: value for paths, value in zip(self._paths, values, strict=True) for path in paths}
            # copies, because a step may change buffers in place, and what it writes must not stay
            given |= {name: value.clone() for name, value in (buffers | keys).items()}
            tape = Noted(client)
            with substitute(client, given), record(client, tape), layers:
                step(client, Batch(x[None], y[None], i[None], 1))
            if tape.loss is None:
                raise MismatchError("a step takes no gradient of a loss, so there is nothing that could be bounded.")
            self.opts, self.takes_gradients = tape.opts, tape.takes_gradients
            return tape.loss.float()

        leaves = [p.detach() for p in self.parameters]
        over_rows = vmap(grad(loss), in_dims=(None, 0, 0, 0, 0), randomness="different")
        with sdpa_kernel(SDPBackend.MATH):  # vmap has no rules for faster attention
            found: list[Tensor] = over_rows(leaves, by_row, batch.x, batch.y, batch.i)
        for key in keys.values():
            key.add_(1)
        return [self._whole(layers, number, value) for number, value in enumerate(found)]

    def _whole(self, layers: Layers, number: int, rest: Tensor) -> Factors | Whole:
        """The gradient of a weight: its factors, or all of it, if more than layers use the weight."""
        factors = layers.factors(number)
        if factors is None or number not in layers.other_uses:
            return factors or Whole(rest)
        return Whole(rest + factors.gradients().view(rest.shape))

    def finish(self, client: Client, step: Step) -> None:
        """Take a step with the noised sum, divided by the expected size of a batch."""
        mean = (self.total + self.deviation * self.noise) / self.batch
        parts = zip(self.parameters, torch.split(mean, self._sizes), strict=True)
        gradients = {id(p): part.view(p.shape) for p, part in parts}
        if self.takes_gradients:
            # the step runs once more, on a row of zeros: it sees nothing of the batch but the private gradient
            with record(client, Given(client, gradients)):
                step(client, _blank(client))
        else:
            for opt in self.opts:
                optimizer = client.optimizers[opt]
                optimizer.apply([gradients[id(p)] for p in optimizer.parameters.values()])
        self.total.zero_()


def _joined(pairs: list[tuple[Factors | Whole, list[Tensor]]]) -> list[tuple[Factors | Whole, list[Tensor]]]:
    """The same with all gradients that are whole as one: biases and norms are many, and small."""
    whole = [(g.value.flatten(1), parts) for g, parts in pairs if isinstance(g, Whole)]
    if len(whole) < 2:
        return pairs
    joined = Whole(torch.cat([value for value, _ in whole], 1)), [part for _, parts in whole for part in parts]
    return [pair for pair in pairs if isinstance(pair[0], Factors)] + [joined]


def clip_factors(norms: Tensor, clip: Tensor | float) -> Tensor:
    """Factors by which vectors of these norms get a norm of at most `clip`. Shorter ones keep their bits."""
    return (clip / norms).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)  # a vector of zeros stays


def sums_of(client: Client, step: RowStep) -> RowSums:
    """The buffers for a step of the client in this place."""
    function = step.step.loss if isinstance(step.step, Descent) else step.step
    key = getattr(function, "__qualname__", repr(function)), step.opts
    if key not in client.row_sums:
        client.row_sums[key] = RowSums(client, step.opts)
    found: RowSums = client.row_sums[key]
    return found


def tallies(client: Client) -> list[Tally]:
    """The tallies of a client's state."""
    return [part for part in client.state.modules() if isinstance(part, Tally)]


@contextmanager
def collecting(found: Iterable[Tally]) -> Iterator[None]:
    """Let tallies collect rows in place of their sums, and forget them."""
    for tally in found:
        tally.collected = []
    try:
        yield
    finally:
        for tally in found:
            tally.collected = None


def _paths(client: Client, parameters: Sequence[nn.Parameter]) -> list[list[str]]:
    """Where each parameter is, in the client's model and state. Tied weights are in several places."""
    places: dict[int, list[str]] = {id(p): [] for p in parameters}
    for part, module in (("model", client.model), ("state", client.state)):
        for name, p in module.named_parameters(remove_duplicate=False):
            if id(p) in places:
                places[id(p)].append(f"{part}.{name}")
    return [places[id(p)] for p in parameters]


def _buffers(client: Client) -> dict[str, Tensor]:
    parts = (("model", client.model), ("state", client.state))
    return {f"{part}.{name}": value for part, module in parts for name, value in module.named_buffers()}


def _dropout_keys(client: Client) -> list[str]:
    """The keys of dropout layers: each row drops other units."""
    parts = (("model", client.model), ("state", client.state))
    found = ((part, name) for part, one in parts for name, layer in one.named_modules() if isinstance(layer, Dropout))
    return [f"{part}.{name}.key" for part, name in found]


def _blank(client: Client) -> Batch:
    """A row of zeros, with a label of zeros."""
    x, device = client.task.input.zeros(1, device=client.device), client.device
    if client.task.target.kind == "classes":
        y = torch.zeros(1, dtype=torch.int64, device=device)
    else:
        y = torch.zeros(1, client.task.classes, device=device)
    return Batch(x, y, torch.zeros(1, dtype=torch.int64, device=device), 1)

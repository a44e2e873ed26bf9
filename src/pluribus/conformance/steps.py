"""A step, held to being a pure tensor program that a GPU can capture.

A step must run on fake tensors, which have shapes but no numbers: whatever looks at a number stops. And a recording of
its tensor operations, made once and played back on other batches, must leave the same bits as the step itself: whatever
Python decides or computes on the side is frozen into the recording and shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from pluribus import draws
from pluribus.client import Batch, Client, Step
from pluribus.conformance.bits import same_bits
from pluribus.conformance.promise import BrokenError
from pluribus.data.federated import Data
from pluribus.engines.observe import observe_step
from pluribus.internal.steps import Eager, Fit
from pluribus.message import Inbox, Kept, Rows
from pluribus.method import Method
from pluribus.optim import Optimizer, Rule

REPLAYS = 6
# Adam counts its steps on the host unless an engine says otherwise, so steps are checked under SGD, with momentum.
RULE = Rule("sgd", lr=0.05, momentum=0.9)


class StepError(BrokenError):
    """A step that could not be captured."""


def check_step(method: Method, client: Client, step: Step, data: Data, size: int) -> None:
    """Hold a step of a client, as it stands, to being a pure tensor program. Leaves no trace in the client."""
    optimizers, client.optimizers = client.optimizers, _optimizers(method, client)
    try:
        with unchanged(client):
            batches = _some_batches(data, min(size, len(data)))
            _runs_on_fake_tensors(method, client, step, batches[0], len(data))
            _shows_no_obstacle(client, step, batches[0], len(data))
            _replays(method, client, step, batches, len(data))
    finally:
        client.optimizers = optimizers


def _optimizers(method: Method, client: Client) -> dict[str, Optimizer]:
    return {name: Optimizer(replace(opt, rule=RULE), RULE) for name, opt in method.optimizers(client).items()}


def _some_batches(data: Data, size: int) -> list[Batch]:
    batches = []
    for number in range(REPLAYS):
        positions = torch.randperm(len(data), generator=draws.generator("batch", number))[:size]
        x, y = data.take(positions)
        batches.append(Batch(x, y, positions, size))
    return batches


# ---- fake tensors --------------------------------------------------------------------------------------------------


def _runs_on_fake_tensors(method: Method, client: Client, step: Step, batch: Batch, samples: int) -> None:
    # What belongs to no client, such as a public set, may stay real: it is converted when it is used.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = copy.copy(client)
    fake.model, fake.state = _fake_module(client.model, mode), _fake_module(client.state, mode)
    fake.got, fake.now = Kept(_fake(client.got, mode)), _fake(client.now, mode)
    if client.inbox is not None:
        fake.inbox = Inbox(client.inbox.ids, _fake(client.inbox.got, mode))
    images, labels, positions = (mode.from_tensor(value) for value in batch[:3])
    try:
        with mode, fake._training(samples):
            fake.optimizers = _optimizers(method, fake)
            step(fake, Batch(images, labels, positions, batch.n))
    except Exception as error:
        raise StepError(f"{step_name(step)} cannot run on tensors without numbers: {error}") from error


def _fake_module(module: nn.Module, mode: FakeTensorMode) -> Any:
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for tensors in (part._parameters, part._buffers):
            fakes: Any = {name: mode.from_tensor(value) for name, value in tensors.items() if value is not None}
            tensors.update(fakes)
    return twin


def _fake(values: Mapping[str, Any], mode: FakeTensorMode) -> dict[str, Any]:
    def one(value: Any) -> Any:
        if isinstance(value, Rows):
            return Rows(mode.from_tensor(value.value), mode.from_tensor(value.held))
        return mode.from_tensor(value)

    return {name: one(value) for name, value in values.items()}


# ---- under observation ---------------------------------------------------------------------------------------------


def _shows_no_obstacle(client: Client, step: Step, batch: Batch, samples: int) -> None:
    """What a GPU's engine looks for before it records a step."""
    with unchanged(client), client._training(samples), observe_step(client) as watch:
        step(client, batch)
    if watch.reason:
        raise StepError(f"{step_name(step)} would not be captured: {watch.reason}.")


# ---- record and replay ---------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One tensor operation: what it was given and what it gave, and how to call it again."""

    do: Callable[..., Any]
    given: list[Any]
    form: TreeSpec
    made: list[Any]


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The tensor operations of a program, in their order. Called with other inputs it does the same to those.

    What torch.fx records is a graph, and that takes most of the time of a check.
    """

    def __init__(self, program: Callable[..., Any], *inputs: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = inputs
        self._operations: list[Operation] = []  # they keep their tensors alive, so that no two have the same id
        with self:
            self._result = program(*inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations.append(Operation(func, *tree_flatten((args, kwargs or {})), tree_leaves(result)))
        return result

    def __call__(self, *inputs: Tensor) -> Any:
        now = {id(then): value for then, value in zip(self._inputs, inputs, strict=True)}
        for operation in self._operations:
            args, kwargs = tree_unflatten([now.get(id(then), then) for then in operation.given], operation.form)
            made = zip(operation.made, tree_leaves(operation.do(*args, **kwargs)), strict=True)
            now |= {id(then): value for then, value in made if isinstance(then, Tensor)}
        return now.get(id(self._result), self._result)


def _replays(method: Method, client: Client, step: Step, batches: Sequence[Batch], samples: int) -> None:
    size = batches[0].n

    def bare(x: Tensor, y: Tensor, i: Tensor) -> Any:
        return step(client, Batch(x, y, i, size))

    with client._training(samples):
        try:
            with unchanged(client):
                recorded = Recording(bare, *batches[0][:3])
        except Exception as error:
            raise StepError(f"{step_name(step)} cannot be recorded: {error}") from error
        with torch.no_grad():
            replayed = _outcome(method, client, recorded, batches)
        stepped = _outcome(method, client, bare, batches)
    differ = [name for name in stepped if not same_bits(stepped[name], replayed[name])]
    if differ:
        raise StepError(f"{step_name(step)} does something besides tensor operations: a replay differs in {differ}.")


def _outcome(
    method: Method, client: Client, run: Callable[..., Any], batches: Sequence[Batch]
) -> dict[str, Tensor | None]:
    """All tensors and losses after some batches, between which time passes."""
    found: dict[str, Tensor | None] = {}
    with unchanged(client), draws.seeded("dropout"):
        for number, batch in enumerate(batches):
            client._round = number
            for name, value in method.schedule(number, len(batches)).items():
                client.now[name].fill_(value)
            loss = run(*batch[:3])
            found[f"loss {number}"] = None if loss is None else loss.detach().clone()
        return found | {name: value.clone() for name, value in everything(client).items()}


def everything(client: Client) -> dict[str, Tensor]:
    """All tensors of a client, live, also those that need not be kept between rounds."""
    slots = {
        f"slots.{key}.{name}": value
        for key, optimizer in client.optimizers.items()
        for name, value in optimizer.slots().items()
    }
    return client.tensors() | slots | {f"now.{name}": value for name, value in client.now.items()}


@contextmanager
def unchanged(client: Client) -> Iterator[None]:
    """Put all tensors of a client back on exit."""
    live, t = everything(client), client._round
    saved = {name: value.detach().clone() for name, value in live.items()}
    try:
        yield
    finally:
        client._round = t
        with torch.no_grad():
            for name, value in live.items():
                value.copy_(saved[name])


def step_name(step: Step) -> str:
    """The name of a step in a sentence."""
    return getattr(step, "__qualname__", repr(step))


class StepChecker(Eager):
    """Runs steps as they are written. Checks each one first: on client 0 up to round 0, on client 1 in round 1, when
    messages came down."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._seen: set[tuple[Any, ...]] = set()
        self.checked: list[str] = []

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        key = getattr(fit.step, "__func__", fit.step), client.card.id
        if client.card.id == max(0, client.round) and key not in self._seen:
            self._seen.add(key)
            check_step(self._method, client, fit.step, fit.data, fit.sizes[0])
            client._in_step = True  # the check has left it
            self.checked.append(step_name(fit.step))
        return super().fit(client, fit)

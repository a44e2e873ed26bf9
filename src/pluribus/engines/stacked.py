"""Many small clients of one architecture train together: their weights are stacked, and one program trains all.

Each client still runs its own `local_update`, in a thread of its own. When it calls `fit`, it waits for the others. The
last one to arrive trains all of them, and each continues with its own result. `torch.func.vmap` computes the losses.
The gradient of their sum has each client's gradient in that client's part of the stack.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from pluribus.client import Client
from pluribus.data.augment import Augment
from pluribus.data.federated import Data, Store
from pluribus.data.scaling import Scale
from pluribus.engines.capture import Tell, capture, name_of_step
from pluribus.internal.batches import Batch
from pluribus.internal.steps import Descent, Fit, Loss, Map, Runner
from pluribus.internal.substitute import substitute
from pluribus.message import Kept, Rows
from pluribus.method import Method
from pluribus.ops import recurrent
from pluribus.optim import Opt, Optimizer

if TYPE_CHECKING:
    from pluribus.engines.cuda import Lane

R = TypeVar("R")
FEWEST = 8  # clients of a stack
MOST = 128
MOST_WEIGHTS = 3_000_000  # of a client: a larger model fills a GPU alone
SLOTS = 8  # a stack has a multiple of this many places, so that one recording serves several numbers of clients


def is_stackable(method: Method, client: Client) -> bool:
    """Whether a client is small, and its method does nothing in a step but descend a loss with SGD.

    Recurrent layers run as one fused kernel, which vmap cannot stack: these clients train one by one.
    """
    optimizer = client.optimizers.get("model")
    if client.guard is not None:
        return False  # its steps take the gradients of single rows
    if not client.data["train"].store.resident:
        return False  # a stack reads the rows of all clients at once
    small = sum(p.numel() for p in client.model.parameters()) <= MOST_WEIGHTS
    plain = type(method).step is Method.step and optimizer is not None and optimizer.rule.name == "sgd"
    return small and plain and not recurrent(client.model)


def split_groups(clients: Sequence[int]) -> list[list[int]]:
    """Split clients into groups to stack. Too few clients stay single."""
    if len(clients) < FEWEST:
        return [[k] for k in clients]
    return [list(clients[i : i + MOST]) for i in range(0, len(clients), MOST)]


class Group:
    """Clients that run in threads, and train together."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._stacks: dict[tuple[str, int], Stack] = {}
        self._refused = False
        # threads for one batch of jobs: the next batch starts when the first has trained, so both share a stack
        self._threads = ThreadPoolExecutor(MOST, "member")

    def do(self, clients: dict[int, Client], jobs: Mapping[int, Callable[[], R]], lane: Lane) -> dict[int, Future[R]]:
        """Queue the jobs of these clients, all on one stream."""

        def run_all(waiting: dict[Client, Fit]) -> dict[Client, Tensor | None]:
            return lane.do(lambda: self._fit(waiting)).result()

        barrier = Barrier(len(jobs), run_all)

        def member(client: Client, job: Callable[[], R]) -> R:
            own, client.runner = client.runner, Member(client.runner, barrier)
            with barrier.join():
                try:
                    with torch.cuda.stream(lane.stream):
                        return job()
                finally:
                    client.runner = own

        return {k: self._threads.submit(member, clients[k], job) for k, job in jobs.items()}

    def _fit(self, waiting: dict[Client, Fit]) -> dict[Client, Tensor | None]:
        losses = {c: loss for c, fit in waiting.items() if (loss := _find_loss(fit)) is not None}
        stacked = {c: waiting[c] for c in losses if c.model.training and not self._refused}
        # a step for all needs one loss, and augments all images or none
        if len({(name_of_step(losses[c]), fit.augment is None) for c, fit in stacked.items()}) > 1:
            stacked = {}
        found: dict[Client, Tensor | None] = {}
        if len(stacked) >= FEWEST:
            try:
                found |= self._get_stack(list(stacked)).fit(stacked)
            except Exception as error:
                self._refused = True
                self._tell(f"clients are not stacked: {str(error).strip().splitlines()[0].rstrip('.')}.")
        for client, fit in waiting.items():
            if client not in found:
                assert isinstance(client.runner, Member)
                found[client] = client.runner.own.fit(client, fit)
        return found

    def _get_stack(self, clients: list[Client]) -> Stack:
        places = -(-len(clients) // SLOTS) * SLOTS
        key = clients[0].card.model, places
        if key not in self._stacks:
            self._stacks[key] = Stack(clients[0], places)
        return self._stacks[key]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def _find_loss(fit: Fit) -> Loss | None:
    """Return the loss of a fit whose steps do nothing but descend it with the optimizer `model`."""
    step = fit.step
    if isinstance(step, Descent):
        nested = isinstance(name_of_step(step), str)
        return step.loss if step.opts == ("model",) and not nested else None
    if getattr(step, "__func__", None) is Method.step:
        return getattr(step, "__self__").loss  # type: ignore[no-any-return]  # noqa: B009
    return None


class Barrier:
    """Makes clients wait until all that joined wait. Only one of them runs at a time, because they share a stream."""

    def __init__(self, size: int, run_all: Callable[[dict[Client, Fit]], dict[Client, Tensor | None]]) -> None:
        self._joined = size
        self._run = run_all
        self._changed = threading.Condition()
        self._waiting: dict[Client, Fit] = {}
        self._answers: dict[Client, Tensor | BaseException | None] = {}

    @contextmanager
    def join(self) -> Iterator[None]:
        """Take part, and run while no other client runs."""
        with self._changed:
            try:
                yield
            finally:
                self._joined -= 1
                self._run_if_all_wait()

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        """Wait for the others, and let them run. The last one to arrive trains all."""
        self._waiting[client] = fit
        self._run_if_all_wait()
        while client not in self._answers:
            self._changed.wait()
        answer = self._answers.pop(client)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _run_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._joined:
            return
        waiting, self._waiting = self._waiting, {}
        try:
            self._answers |= self._run(waiting)
        except BaseException as error:
            self._answers |= dict.fromkeys(waiting, error)
        self._changed.notify_all()


class Member(NamedTuple):
    """The runner of a client in a group: it trains with the others, and sweeps alone."""

    own: Runner
    barrier: Barrier

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        return self.barrier.fit(client, fit)

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        return self.own.sweep(client, rows, data)


class _GroupStep(NamedTuple):
    """One step of all clients whose next batch has this size: which clients, and where their batches start."""

    size: int
    active: list[bool]
    starts: list[int]


class Stack:
    """Stacked tensors of several clients, and the recorded steps on them."""

    def __init__(self, client: Client, places: int) -> None:
        self._places = places
        self._one = copy.copy(client)  # vmap gives it the tensors of one place at a time
        self._one.model, self._one.state = copy.deepcopy(client.model), copy.deepcopy(client.state)
        self._one.now = {name: value.clone() for name, value in client.now.items()}
        self._one.data = {}
        self._stack = {
            name: torch.zeros((places, *value.shape), dtype=value.dtype, device=client.device)
            for name, value in _tensors(client).items()
        }
        trained = {f"model.{name}": None for name in client.optimizers["model"].parameters}
        self._stack |= {name: nn.Parameter(self._stack[name]) for name in trained}
        self._leaves = [self._stack[name] for name in trained]
        rule = client.optimizers["model"].rule
        self._optimizer = Optimizer(Opt(self._leaves), rule, stacked=True)  # type: ignore[arg-type]
        self._by_place = [[value.detach()[at] for value in self._all()] for at in range(places)]
        self._totals = torch.zeros(places, device=client.device)
        self._recordings: dict[Any, _Recorded | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if client.device.type == "cuda" else None

    def fit(self, fits: Mapping[Client, Fit]) -> dict[Client, Tensor | None]:
        """Train these clients. Returns their mean losses."""
        clients, first = list(fits), next(iter(fits))
        self._optimizer.begin(first.trained)
        for name, value in first.now.items():
            self._one.now[name].copy_(value)
        self._totals.zero_()
        self._copy(clients, inward=True)
        for module in (self._one.model, self._one.state):
            module.train()
        loss = _find_loss(fits[first])
        assert loss is not None
        store = fits[first].data.store
        orders = [fit.order[: sum(fit.sizes)].to(first.device, non_blocking=True) for fit in fits.values()]
        rows = [fit.data.rows[order] for fit, order in zip(fits.values(), orders, strict=True)]
        missing = [rows[0]] * (self._places - len(rows))  # empty places train on any rows; the result is not used
        keys = [fit.augment.keys for fit in fits.values() if fit.augment is not None]
        visited = [pad_sequence(parts + missing, batch_first=True) for parts in (rows, orders, keys) if parts]
        scale = _stack_scales([fit.data.scale for fit in fits.values()], self._places)
        steps = _group_steps([fit.sizes for fit in fits.values()], self._places)
        starts = torch.tensor([step.starts for step in steps]).to(first.device, non_blocking=True)
        active = torch.tensor([step.active for step in steps]).to(first.device, non_blocking=True)
        for index, step in enumerate(steps):
            everyone = all(step.active[: len(clients)])
            columns = starts[index][:, None] + torch.arange(step.size, device=first.device)
            columns = columns.clamp(max=visited[0].shape[1] - 1)
            now = [part.gather(1, columns) for part in visited]
            given = _Given(None if everyone else active[index], now[0], now[1], now[2] if keys else None, scale)
            self._run_step(loss, store, step.size, given)
        self._copy(clients, inward=False)
        return {c: self._totals[at].clone() / sum(fit.sizes) for at, (c, fit) in enumerate(fits.items())}

    def _copy(self, clients: Sequence[Client], inward: bool) -> None:
        """Copy the tensors of all clients into the stack, or back."""
        stacked: dict[torch.dtype, list[Tensor]] = {}
        own: dict[torch.dtype, list[Tensor]] = {}
        for client, place in zip(clients, self._by_place, strict=False):
            live = [*_tensors(client).values(), *client.optimizers["model"].slots().values()]  # as in the stack
            for value, part in zip(live, place, strict=True):
                stacked.setdefault(value.dtype, []).append(part)
                own.setdefault(value.dtype, []).append(value)
        with torch.no_grad():
            for kind, tensors in own.items():
                torch._foreach_copy_(*((stacked[kind], tensors) if inward else (tensors, stacked[kind])))

    def _run_step(self, loss: Loss, store: Store, n: int, given: _Given) -> None:
        """Run one step of all or of the active clients: as written, then recorded, then replayed."""
        key = name_of_step(loss), n, given.active is not None, given.keys is not None, given.scale is not None
        if key not in self._recordings or not given.rows.is_cuda:
            self._recordings[key] = None
            self._step(loss, store, n, given)
            return
        recorded = self._recordings[key]
        if recorded is None:
            buffers = given.clone()
            graph = torch.cuda.CUDAGraph()
            with capture(graph, self._pool, given.rows.device):
                self._step(loss, store, n, buffers)
            recorded = self._recordings[key] = _Recorded(graph, buffers)
        recorded.play(given)

    def _step(self, loss: Loss, store: Store, n: int, given: _Given) -> None:
        shape, active = (self._places, n), given.active
        augment = None if given.keys is None else Augment(self._one.local.augment, given.keys.flatten())
        scale = None if given.scale is None else Scale(*(part.repeat_interleave(n, 0) for part in given.scale))
        x, y = store.take(given.rows.flatten(), augment, scale)
        x = x.contiguous().view(*shape, *x.shape[1:])
        kept = [] if active is None else [value.detach().clone() for value in self._all()]

        def one(tensors: dict[str, Tensor], x: Tensor, y: Tensor, i: Tensor) -> Tensor:
            with _substitute(self._one, tensors):
                return loss(self._one, Batch(x, y, i, n))

        with self._one.autocast():
            losses = vmap(one)(self._stack, x, y.view(*shape, *y.shape[1:]), given.positions)
        self._optimizer.apply(torch.autograd.grad(losses.sum(), self._leaves, allow_unused=True))
        with torch.no_grad():
            if active is not None:
                losses = torch.where(active, losses, 0.0)
                for value, old in zip(self._all(), kept, strict=True):
                    value.copy_(torch.where(active.view(-1, *[1] * (value.dim() - 1)), value, old))
            self._totals.add_(losses.detach() * n)

    def _all(self) -> list[Tensor]:
        return [*self._stack.values(), *self._optimizer.slots().values()]


class _Given(NamedTuple):
    """Inputs of a step. Rows, positions and keys are (places, batch)."""

    active: Tensor | None  # places; None: all
    rows: Tensor
    positions: Tensor
    keys: Tensor | None = None  # None: rows are not augmented
    scale: Scale | None = None  # of each place

    def clone(self) -> _Given:
        return _Given(*(None if value is None else value.clone() for value in self))  # type: ignore[arg-type]

    def tensors(self) -> list[Tensor]:
        return [value for value in (*self[:4], *(self.scale or ())) if value is not None]


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    buffers: _Given

    def play(self, given: _Given) -> None:
        for buffer, value in zip(self.buffers.tensors(), given.tensors(), strict=True):
            buffer.copy_(value)
        self.graph.replay()


def _group_steps(sizes: Sequence[Sequence[int]], places: int) -> list[_GroupStep]:
    """Split the batches of all clients into steps: the j-th batches together, one size at a time."""
    starts, steps = [0] * places, []
    for j in range(max(map(len, sizes))):
        now = [own[j] if j < len(own) else 0 for own in sizes] + [0] * (places - len(sizes))
        for size in sorted(set(now) - {0}, reverse=True):
            steps.append(_GroupStep(size, [n == size for n in now], list(starts)))
        starts = [start + n for start, n in zip(starts, now, strict=True)]
    return steps


def _stack_scales(scales: Sequence[Scale | None], places: int) -> Scale | None:
    """The scales of all clients, one per place. Empty places have any scale."""
    known = [scale for scale in scales if scale is not None]
    if not known:
        return None
    known += [known[0]] * (places - len(known))
    return Scale(torch.stack([one.mean for one in known]), torch.stack([one.factor for one in known]))


def _tensors(client: Client) -> dict[str, Tensor]:
    """All tensors of a client that a loss may read or a step may change."""
    found: dict[str, Tensor] = {} if client.class_weight is None else {"class_weight": client.class_weight}
    for part, module in (("model", client.model), ("state", client.state)):
        found |= {f"{part}.{n}": v.detach() for n, v in (*module.named_parameters(), *module.named_buffers())}
    for name, value in client.got.items():
        parts = {"value": value.value, "held": value.held} if isinstance(value, Rows) else {"": value}
        found |= {f"got.{name}.{part}": tensor for part, tensor in parts.items()}
    return found


@contextmanager
def _substitute(client: Client, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the client these tensors instead of its own, also those of its downloads."""
    got, weight = client.got, client.class_weight
    client.class_weight = tensors.get("class_weight")
    client.got = Kept({name: _substitute_value(name, value, tensors) for name, value in got.items()})
    try:
        with substitute(client, tensors):
            yield
    finally:
        client.got, client.class_weight = got, weight


def _substitute_value(name: str, value: Tensor | Rows, tensors: Mapping[str, Tensor]) -> Tensor | Rows:
    if isinstance(value, Rows):
        return Rows(tensors[f"got.{name}.value"], tensors[f"got.{name}.held"])
    return tensors[f"got.{name}."]

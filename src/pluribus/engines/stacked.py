"""Many small clients of one architecture take their steps together: their weights lie stacked, one program serves all.

Each client still runs its own `local_update`, in a thread of its own. Where it calls `fit` it waits for the others; the
last to come trains all of them, and each goes on with its own result. Losses are computed by `torch.func.vmap`; the sum
of all losses has each client's gradient in that client's part of the stack.
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
from pluribus.engines.capture import Tell, capturing, name_of_step
from pluribus.internal.batches import Batch
from pluribus.internal.steps import Descent, Fit, Loss, Map, Runner
from pluribus.message import Kept, Rows
from pluribus.method import Method
from pluribus.optim import Opt, Optimiser

if TYPE_CHECKING:
    from pluribus.engines.cuda import Lane

R = TypeVar("R")
FEWEST = 8  # clients that are worth stacking
MOST = 128
MOST_WEIGHTS = 3_000_000  # of a client: larger models fill a GPU by themselves
SLOTS = 8  # a stack has a multiple of so many places, so that one recording serves several numbers of clients


def stackable(method: Method, client: Client) -> bool:
    """Whether a client is small and its method descends a loss, by SGD, and does nothing else in a step."""
    optimiser = client.optimisers.get("model")
    small = sum(p.numel() for p in client.model.parameters()) <= MOST_WEIGHTS
    return small and type(method).step is Method.step and optimiser is not None and optimiser.rule.name == "sgd"


def cut(clients: Sequence[int]) -> list[list[int]]:
    """Groups to be stacked, and singles where there are too few."""
    if len(clients) < FEWEST:
        return [[k] for k in clients]
    return [list(clients[i : i + MOST]) for i in range(0, len(clients), MOST)]


# ---- clients that wait for each other ------------------------------------------------------------------------------


class Gang:
    """Clients that work side by side, and train together."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._banks: dict[tuple[str, int], Bank] = {}
        self._refused = False
        # threads for one group: all of a second one are there only when the first has trained, so they share a bank
        self._threads = ThreadPoolExecutor(MOST, "member")

    def do(
        self, clients: Mapping[int, Client], jobs: Mapping[int, Callable[[], R]], lane: Lane
    ) -> dict[int, Future[R]]:
        """Queue the work of these clients, all on one stream."""

        def together(waiting: dict[Client, Fit]) -> dict[Client, Tensor | None]:
            return lane.do(lambda: self._fit(waiting)).result()

        meeting = Meeting(len(jobs), together)

        def member(client: Client, job: Callable[[], R]) -> R:
            own, client.runner = client.runner, Member(client.runner, meeting)
            with meeting.attended():
                try:
                    with torch.cuda.stream(lane.stream):
                        return job()
                finally:
                    client.runner = own

        return {k: self._threads.submit(member, clients[k], job) for k, job in jobs.items()}

    def _fit(self, waiting: dict[Client, Fit]) -> dict[Client, Tensor | None]:
        losses = {c: loss for c, fit in waiting.items() if (loss := _descended(fit)) is not None}
        stacked = {c: waiting[c] for c in losses if c.model.training and not self._refused}
        # one step for all: of one loss, and it changes all images, or none
        if len({(name_of_step(losses[c]), fit.augment is None) for c, fit in stacked.items()}) > 1:
            stacked = {}
        found: dict[Client, Tensor | None] = {}
        if len(stacked) >= FEWEST:
            try:
                found |= self._bank(list(stacked)).fit(stacked)
            except Exception as error:
                self._refused = True
                self._tell(f"clients are not stacked: {str(error).strip().splitlines()[0].rstrip('.')}.")
        for client, fit in waiting.items():
            if client not in found:
                assert isinstance(client.runner, Member)
                found[client] = client.runner.own.fit(client, fit)
        return found

    def _bank(self, clients: list[Client]) -> Bank:
        places = -(-len(clients) // SLOTS) * SLOTS
        key = clients[0].card.model, places
        if key not in self._banks:
            self._banks[key] = Bank(clients[0], places)
        return self._banks[key]

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(cancel_futures=True)


def _descended(fit: Fit) -> Loss | None:
    """The loss of a fit whose steps descend it with the optimizer `model` and do nothing else."""
    step = fit.step
    if isinstance(step, Descent):
        nested = isinstance(name_of_step(step), str)
        return step.loss if step.opts == ("model",) and not nested else None
    if getattr(step, "__func__", None) is Method.step:
        return getattr(step, "__self__").loss  # type: ignore[no-any-return]  # noqa: B009
    return None


class Meeting:
    """A place where some wait until all who are still here wait too. One at a time moves: they share a stream."""

    def __init__(self, size: int, together: Callable[[dict[Client, Fit]], dict[Client, Tensor | None]]) -> None:
        self._here = size
        self._together = together
        self._changed = threading.Condition()
        self._waiting: dict[Client, Fit] = {}
        self._answers: dict[Client, Tensor | BaseException | None] = {}

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Be there, and move while no other does."""
        with self._changed:
            try:
                yield
            finally:
                self._here -= 1
                self._go_if_all_wait()

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        """Wait for the others, and let them move; the last one has the work done for all."""
        self._waiting[client] = fit
        self._go_if_all_wait()
        while client not in self._answers:
            self._changed.wait()
        answer = self._answers.pop(client)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _go_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._here:
            return
        waiting, self._waiting = self._waiting, {}
        try:
            self._answers |= self._together(waiting)
        except BaseException as error:
            self._answers |= dict.fromkeys(waiting, error)
        self._changed.notify_all()


class Member:
    """The runner of a client in a gang: trains with the others, and sweeps by itself."""

    def __init__(self, own: Runner, meeting: Meeting) -> None:
        self.own = own
        self._meeting = meeting

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        """All steps of a fit, together with the others."""
        return self._meeting.fit(client, fit)

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        """`rows` of every sample of a set."""
        return self.own.sweep(client, rows, data)


# ---- one step for all ----------------------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """One step of everyone who has a batch of this size now: who that is, and where their batches start."""

    size: int
    active: list[bool]
    starts: list[int]


class Bank:
    """Stacked tensors of so many clients, and the recorded steps on them."""

    def __init__(self, client: Client, places: int) -> None:
        self._places = places
        self._one = copy.copy(client)  # whose tensors are the stack's, one place at a time
        self._one.model, self._one.state = copy.deepcopy(client.model), copy.deepcopy(client.state)
        self._one.now = {name: value.clone() for name, value in client.now.items()}
        self._one.data = {}
        self._stack = {
            name: torch.zeros((places, *value.shape), dtype=value.dtype, device=client.device)
            for name, value in _tensors(client).items()
        }
        trained = {f"model.{name}": None for name in client.optimisers["model"].parameters}
        self._stack |= {name: nn.Parameter(self._stack[name]) for name in trained}
        self._leaves = [self._stack[name] for name in trained]
        self._optimiser = Optimiser(Opt(self._leaves), client.optimisers["model"].rule)  # type: ignore[arg-type]
        self._by_place = [[value.detach()[at] for value in self._all()] for at in range(places)]
        self._totals = torch.zeros(places, device=client.device)
        self._recordings: dict[tuple[Any, int, bool, bool], _Recorded | None] = {}
        self._pool = torch.cuda.graph_pool_handle() if client.device.type == "cuda" else None

    def fit(self, fits: Mapping[Client, Fit]) -> dict[Client, Tensor | None]:
        """Train these clients; their mean losses."""
        clients, first = list(fits), next(iter(fits))
        self._optimiser.begin(max(first.round, 0))
        for name, value in first.now.items():
            self._one.now[name].copy_(value)
        self._totals.zero_()
        self._copy(clients, inward=True)
        for module in (self._one.model, self._one.state):
            module.train()
        loss = _descended(fits[first])
        assert loss is not None
        store = fits[first].data.store
        orders = [fit.order[: sum(fit.sizes)].to(first.device, non_blocking=True) for fit in fits.values()]
        rows = [fit.data.rows[order] for fit, order in zip(fits.values(), orders, strict=True)]
        missing = [rows[0]] * (self._places - len(rows))  # places that nobody takes train on something, for nobody
        keys = [fit.augment.keys for fit in fits.values() if fit.augment is not None]
        visited = [pad_sequence(parts + missing, batch_first=True) for parts in (rows, orders, keys) if parts]
        turns = _turns([fit.sizes for fit in fits.values()], self._places)
        starts = torch.tensor([turn.starts for turn in turns]).to(first.device, non_blocking=True)
        active = torch.tensor([turn.active for turn in turns]).to(first.device, non_blocking=True)
        for at, turn in enumerate(turns):
            everyone = all(turn.active[: len(clients)])
            columns = (starts[at][:, None] + torch.arange(turn.size, device=first.device)).clamp(
                max=visited[0].shape[1] - 1
            )
            now = [part.gather(1, columns) for part in visited]
            self._take(loss, store, turn.size, _Given(None if everyone else active[at], *now))
        self._copy(clients, inward=False)
        return {c: self._totals[at].clone() / sum(fit.sizes) for at, (c, fit) in enumerate(fits.items())}

    def _copy(self, clients: Sequence[Client], inward: bool) -> None:
        """Everyone's tensors into the stack, or back."""
        stacked: dict[torch.dtype, list[Tensor]] = {}
        own: dict[torch.dtype, list[Tensor]] = {}
        for client, place in zip(clients, self._by_place, strict=False):
            for value, part in zip(_moved(client).values(), place, strict=True):
                stacked.setdefault(value.dtype, []).append(part)
                own.setdefault(value.dtype, []).append(value)
        with torch.no_grad():
            for kind, theirs in own.items():
                torch._foreach_copy_(*((stacked[kind], theirs) if inward else (theirs, stacked[kind])))

    def _take(self, loss: Loss, store: Store, n: int, given: _Given) -> None:
        """One step of everyone, or of those who are active: as written, then recorded, then replayed."""
        key = name_of_step(loss), n, given.active is not None, given.keys is not None
        if key not in self._recordings or not given.rows.is_cuda:
            self._recordings[key] = None
            self._step(loss, store, n, given)
            return
        recorded = self._recordings[key]
        if recorded is None:
            buffers = given.cloned()
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, self._pool, given.rows.device):
                self._step(loss, store, n, buffers)
            recorded = self._recordings[key] = _Recorded(graph, buffers)
        recorded.play(given)

    def _step(self, loss: Loss, store: Store, n: int, given: _Given) -> None:
        shape, active = (self._places, n), given.active
        augment = None if given.keys is None else Augment(self._one.local.augment, given.keys.flatten())
        x, y = store.take(given.rows.flatten(), augment)
        x = x.contiguous().view(*shape, *x.shape[1:])
        kept = [] if active is None else [value.detach().clone() for value in self._all()]

        def one(tensors: dict[str, Tensor], x: Tensor, y: Tensor, i: Tensor) -> Tensor:
            with _dressed(self._one, tensors):
                return loss(self._one, Batch(x, y, i, n))

        with self._one.autocast():
            losses = vmap(one)(self._stack, x, y.view(shape), given.positions)
        self._optimiser.apply(torch.autograd.grad(losses.sum(), self._leaves, allow_unused=True))
        with torch.no_grad():
            if active is not None:
                losses = torch.where(active, losses, 0.0)
                for value, old in zip(self._all(), kept, strict=True):
                    value.copy_(torch.where(active.view(-1, *[1] * (value.dim() - 1)), value, old))
            self._totals.add_(losses.detach() * n)

    def _all(self) -> list[Tensor]:
        return [*self._stack.values(), *self._optimiser.slots().values()]


class _Given(NamedTuple):
    """What a step for all is given: who takes it (None: everyone), and rows, positions and keys, (places, batch).

    Images without keys stay as they are.
    """

    active: Tensor | None
    rows: Tensor
    positions: Tensor
    keys: Tensor | None = None

    def cloned(self) -> _Given:
        """Buffers of its own."""
        active, keys = (None if value is None else value.clone() for value in (self.active, self.keys))
        return _Given(active, self.rows.clone(), self.positions.clone(), keys)


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    buffers: _Given

    def play(self, given: _Given) -> None:
        for buffer, value in zip(self.buffers, given, strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)
        self.graph.replay()


def _turns(sizes: Sequence[Sequence[int]], places: int) -> list[_Turn]:
    """Everyone's batches in steps for all: the j-th batches together, those of one size at a time."""
    starts, turns = [0] * places, []
    for j in range(max(map(len, sizes))):
        now = [own[j] if j < len(own) else 0 for own in sizes] + [0] * (places - len(sizes))
        for size in sorted(set(now) - {0}, reverse=True):
            turns.append(_Turn(size, [n == size for n in now], list(starts)))
        starts = [start + n for start, n in zip(starts, now, strict=True)]
    return turns


def _tensors(client: Client) -> dict[str, Tensor]:
    """All that a loss may read of a client, and that a step may change."""
    found: dict[str, Tensor] = {}
    for part, module in (("model", client.model), ("state", client.state)):
        found |= {f"{part}.{n}": v.detach() for n, v in (*module.named_parameters(), *module.named_buffers())}
    for name, value in client.got.items():
        parts = {"value": value.value, "held": value.held} if isinstance(value, Rows) else {"": value}
        found |= {f"got.{name}.{part}": tensor for part, tensor in parts.items()}
    return found


def _moved(client: Client) -> dict[str, Tensor]:
    """What goes into the stack and comes back, in the stack's order."""
    return _tensors(client) | {f"slot.{name}": value for name, value in client.optimisers["model"].slots().items()}


@contextmanager
def _dressed(client: Client, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The client with these tensors for its own."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for part, module in (("model", client.model), ("state", client.state)):
        for prefix, child in module.named_modules():
            for own in (child._parameters, child._buffers):
                for name, value in own.items():
                    given = tensors.get(".".join(filter(None, (part, prefix, name))))
                    if given is not None:
                        before.append((own, name, value))
                        own[name] = given
    got = client.got
    client.got = Kept({name: _dressed_value(name, value, tensors) for name, value in got.items()})
    try:
        yield
    finally:
        client.got = got
        for own, name, value in before:
            own[name] = value


def _dressed_value(name: str, value: Tensor | Rows, tensors: Mapping[str, Tensor]) -> Tensor | Rows:
    if isinstance(value, Rows):
        return Rows(tensors[f"got.{name}.value"], tensors[f"got.{name}.held"])
    return tensors[f"got.{name}."]

"""What a client will do in a run, found by a rehearsal: its method works once, without a step and without a release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.errors import MismatchError
from pluribus.internal.batches import Batch
from pluribus.internal.steps import Fit, Map, RowStep, Step
from pluribus.message import Message
from pluribus.method import Method, PeerMethod, name_of
from pluribus.privacy.accountant import Spend
from pluribus.privacy.rows import tallies

if TYPE_CHECKING:
    from pluribus.internal.guard import Guard

TryStep = Callable[[Client, Step, Data], None]
Kinds = tuple[tuple[float, int], ...]  # sampling rates, each with a number of steps


class Plan(NamedTuple):
    """Private steps by their sampling rate and releases, of all rounds together and of one round."""

    steps: Kinds
    releases: int
    round_steps: Kinds
    round_releases: int
    unbounded: int = 0
    """Sweeps over private rows whose result no mechanism has bounded."""

    def whole(self, training: float, sums: float) -> list[Spend]:
        """What the whole run spends, with these noise multipliers."""
        return _spends(self.steps, self.releases, training, sums)

    def round(self, training: float, sums: float) -> list[Spend]:
        """What one round spends."""
        return _spends(self.round_steps, self.round_releases, training, sums)


def _spends(steps: Kinds, releases: int, training: float, sums: float) -> list[Spend]:
    trained = [Spend(training, rate, times) for rate, times in steps]
    return [*trained, Spend(sums, 1.0, releases)] if releases else trained


class Meter:
    """Counts what a method does with private rows, and does none of it."""

    def __init__(self, guard: Guard, try_step: TryStep | None) -> None:
        self._guard, self._try_step = guard, try_step
        self.steps = Counter[float]()
        self.releases = 0
        self.sweeps = 0  # over private rows, without those behind class sums

    def protects(self, client: Client, data: Data) -> bool:
        return self._guard.protects(client, data)

    def fit(self, client: Client, step: Step, data: Data, batch: int, steps: int, augment: bool) -> None:
        if self._try_step is not None:
            self._try_step(client, step, data)
        self.steps[min(1.0, batch / len(data))] += steps
        self.releases += len(tallies(client))

    def add_rows(self, client: Client, step: RowStep, batch: Batch) -> None:
        raise AssertionError("a rehearsal takes no step")

    def take_step(self, client: Client, step: RowStep) -> None:
        raise AssertionError("a rehearsal takes no step")

    def class_sums(self, client: Client, members: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.releases += 1
        self.sweeps -= 1
        return members.T @ torch.zeros_like(values), members.sum(0)

    def class_counts(self, client: Client, members: Tensor) -> Tensor:
        self.releases += 1
        return members.sum(0)

    def take(self) -> tuple[Counter[float], int]:
        """What was counted since the last call."""
        found, self.steps, self.releases = (self.steps, self.releases), Counter(), 0
        return found


class _Idle:
    """A runner that takes no step, and whose sweeps give zeros."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def fit(self, client: Client, fit: Fit) -> Tensor | None:
        return None

    def sweep(self, client: Client, rows: Map, data: Data) -> Tensor:
        self._meter.sweeps += self._meter.protects(client, data)
        with torch.no_grad():
            one = rows(client, client.task.input.zeros(1, device=client.device)).float()
        return torch.zeros_like(one).expand(len(data), *one.shape[1:]).clone()


def measure_plan(method: Method, client: Client, guard: Guard, try_step: TryStep | None = None) -> Plan:
    """What a client does in a whole run: it enrolls, and takes part in every round. `try_step` gets every step."""
    task = client.task
    with _rehearsing(client, Meter(guard, try_step)) as meter:
        if method.enrols:
            client.begin(-1, "enrol", method.schedule(0, task.rounds))
            method.enrol(client)
        once, once_releases = meter.take()
        warm, warm_releases = _rehearse_round(method, client, meter, 0) if task.warmup else (Counter[float](), 0)
        steps, releases = _rehearse_round(method, client, meter, task.warmup)
        unbounded = meter.sweeps
        _check_views(method, client, meter)
    trained = task.rounds - task.warmup
    whole = Counter[float]()
    for times, found in ((1, once), (task.warmup, warm), (trained, steps)):
        for rate, number in found.items():
            whole[rate] += times * number
    released = once_releases + task.warmup * warm_releases + trained * releases
    return Plan(tuple(sorted(whole.items())), released, tuple(sorted(steps.items())), releases, unbounded)


@contextmanager
def _rehearsing(client: Client, meter: Meter) -> Iterator[Meter]:
    before = client.guard, client.runner
    client.guard, client.runner = meter, _Idle(meter)
    try:
        with client.fork():
            yield meter
    finally:
        client.guard, client.runner = before


def _rehearse_round(method: Method, client: Client, meter: Meter, t: int) -> tuple[Counter[float], int]:
    """One round without downloads. Of peers only what they teach: they learn from public rows."""
    now = method.schedule(t, client.task.rounds)
    for stage in range(1 if isinstance(method, PeerMethod) else len(method.exchanges)):
        client.begin(t, stage, now)
        _: Message | None = (
            method.teach(client) if isinstance(method, PeerMethod) else method.functions(stage).work(client)
        )
    return meter.take()


def _check_views(method: Method, client: Client, meter: Meter) -> None:
    """Refuse a method that trains on private rows for an evaluation: its accuracy would tell about them, unbounded."""
    t = client.task.warmup
    for view in method.views:
        if view == "after":
            continue
        client.begin(t, f"evaluation {view}", method.schedule(t, client.task.rounds))
        method.adapt(client, view)
        steps, releases = meter.take()
        if steps or releases:
            raise MismatchError(
                f"{name_of(type(method))} trains on private rows before every evaluation (view '{view}'), which no "
                f"budget covers: use another method with --dp-epsilon."
            )

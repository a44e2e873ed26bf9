"""Row-level privacy of one client: private training, noised class sums and counts, and what all of it costs.

Everything that a client sends is computed from its rows by these three mechanisms, or from their results and public
rows, which costs nothing more. What it has spent is part of its state: a table of releases, saved with its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from pluribus import draws
from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.errors import BudgetError, ConflictError, MismatchError
from pluribus.internal.batches import Batch
from pluribus.internal.steps import Descent, Finish, RowStep, Step, sweep_sizes
from pluribus.method import Method
from pluribus.ops import onehot
from pluribus.privacy.accountant import Spend, epsilon_of, find_noise
from pluribus.privacy.check import check_client, check_releases, try_step
from pluribus.privacy.plan import Plan, measure_plan
from pluribus.privacy.rows import clip_factors, collecting, optimizers_of, sums_of, tallies
from pluribus.privacy.sampling import Randomness, draw_batches
from pluribus.privacy.terms import Terms

MOST_KINDS = 16  # of releases of one client: noise and sampling rate
SLACK = 1 + 1e-6  # of epsilon: sums in another order round differently
HELD = 2.0  # standard deviations: a class with a smaller noised count is taken for one that the client does not hold


class RowGuard:
    """Protects the rows of the clients of a host. One row more or less changes little of what a client sends."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._plans: dict[int, Plan] = {}
        self._noise: dict[Plan, tuple[float, float]] = {}  # of training, and of class sums
        self._own: dict[int, Tensor] = {}  # private rows of each client, sorted

    # ---- what the host calls -----------------------------------------------------------------------------------------

    def attach(self, client: Client) -> None:
        """Give a new client a table of what it has spent. Before `State.fix`."""
        client.guard = self
        client.state.spent = torch.zeros(MOST_KINDS, 3, dtype=torch.float64)

    def begin(self, method: Method, client: Client) -> None:
        """Choose the noise of a client before it first works."""
        k = client.card.id
        if k not in self._plans:
            check_client(client)
            self._plans[k] = measure_plan(method, client, self)
        self._choose_noise(self._plans[k])

    def rehearse(self, method: Method, client: Client) -> None:
        """Refuse, before round 0, what could not be bounded later. Tries every step of the method on two rows."""
        check_client(client)
        plan = measure_plan(method, client, self, try_step)
        if not self._terms.transparent:
            check_releases(method, client, plan)
            self._check_first_round(client, plan)

    def _check_first_round(self, client: Client, plan: Plan) -> None:
        """Refuse noise with which the budget does not last for one round."""
        cost = epsilon_of(plan.round(*self._choose_noise(plan)), self._terms.delta)
        if cost > self._terms.epsilon * SLACK:
            raise BudgetError(
                f"client {client.card.id} would spend epsilon {cost:.3g} in one round, and {self._terms.epsilon:g} is "
                f"allowed (--dp-epsilon): use a larger --dp-noise, or leave it out."
            )

    def epsilon(self, client: Client) -> float:
        """What a client has spent so far."""
        return epsilon_of(_read(client.state.spent), self._terms.delta)

    def affords_round(self, client: Client) -> bool:
        """Whether the budget of a client allows one more round."""
        if self._terms.transparent:
            return True
        plan = self._plans[client.card.id]
        training, sums = self._choose_noise(plan)
        after = [*_read(client.state.spent), *plan.round(training, sums)]
        return epsilon_of(after, self._terms.delta) <= self._terms.epsilon * SLACK

    def _choose_noise(self, plan: Plan) -> tuple[float, float]:
        if plan not in self._noise:
            self._noise[plan] = choose_noise(self._terms, plan)
        return self._noise[plan]

    # ---- training ----------------------------------------------------------------------------------------------------

    def protects(self, client: Client, data: Data) -> bool:
        if self._terms.transparent:
            return False
        k = client.card.id
        if k not in self._own:
            self._own[k] = client.data["train"].rows.sort().values
        own = self._own[k]
        place = torch.searchsorted(own, data.rows).clamp(max=len(own) - 1)
        return bool((own[place] == data.rows).any())

    def fit(self, client: Client, step: Step, data: Data, batch: int, steps: int, augment: bool) -> None:
        terms, rows = self._terms, len(data)
        noise, _ = self._choose_noise(self._plans[client.card.id])
        self._charge(client, Spend(noise, min(1.0, batch / rows), steps))
        randomness = self._randomness(client, "training")
        batches = draw_batches(rows, batch, steps, randomness.uniform)
        first = RowStep(step, optimizers_of(client, step))
        sums = sums_of(client, first)
        sums.start(terms.clip, noise, batch)
        finish = Finish(first.finish(), batches.ends, lambda: randomness.fill_normal(sums.noise))
        with collecting(tallies(client)):
            client.visit(first, data, batches.order, batches.sizes, augment, finish)
        self._fill_tallies(client, step, data)

    def add_rows(self, client: Client, step: RowStep, batch: Batch) -> None:
        sums_of(client, step).add(client, step.step, batch)

    def take_step(self, client: Client, step: RowStep) -> None:
        sums_of(client, step).finish(client, step.step)

    def _fill_tallies(self, client: Client, step: Step, data: Data) -> None:
        """Fill the tallies of a method from one pass over the rows, in which each row counts once."""
        found = tallies(client)
        if not found:
            return
        loss = step.loss if isinstance(step, Descent) else getattr(getattr(step, "__self__", None), "loss", None)
        if loss is None:
            raise MismatchError("a tally of a step that is no loss cannot be bounded: call client.fit(loss, opts=...).")
        client.set_mode(False)
        with torch.no_grad(), client.autocast(), collecting(found):
            for positions in torch.split(torch.arange(len(data), device=client.device), sweep_sizes(len(data))):
                loss(client, Batch(*data.take(positions), positions, len(positions)))
            collected = [one.collected or [] for one in found]
        for tally, parts in zip(found, collected, strict=True):
            y, values = (torch.cat(one) for one in zip(*parts, strict=True))
            sums, counts = self.class_sums(client, onehot(y, len(tally.counts)), values)
            tally.sums.copy_(sums)
            tally.counts.copy_(counts)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def class_sums(self, client: Client, members: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """One release: a row is the vector (v / C, 1) in its class, whose norm is at most sqrt(2)."""
        if self._terms.transparent:
            return members.T @ values, members.sum(0)
        clip = self._terms.sums_clip
        noise, randomness = self._release(client)
        deviation = math.sqrt(2) * noise
        values = values.float()
        clipped = values * clip_factors(torch.linalg.vector_norm(values, dim=1), clip)[:, None]
        sums = members.T @ clipped + deviation * clip * _normal(randomness, (members.shape[1], values.shape[1]), values)
        counts = members.sum(0) + deviation * _normal(randomness, (members.shape[1],), values)
        held = counts >= max(0.5, HELD * deviation)
        return sums * held[:, None], counts * held

    def class_counts(self, client: Client, members: Tensor) -> Tensor:
        if self._terms.transparent:
            return members.sum(0)
        noise, randomness = self._release(client)
        counts = members.sum(0) + noise * _normal(randomness, (members.shape[1],), members)
        return counts * (counts >= max(0.5, HELD * noise))

    def _release(self, client: Client) -> tuple[float, Randomness]:
        """Pay for a release of class sums or counts. Returns its noise multiplier, and where noise comes from."""
        _, noise = self._choose_noise(self._plans[client.card.id])
        self._charge(client, Spend(noise, 1.0, 1))
        times = sum(one.times for one in _read(client.state.spent))  # another key for each release
        return noise, self._randomness(client, "sums", times)

    # ---- budget ------------------------------------------------------------------------------------------------------

    def _charge(self, client: Client, spend: Spend) -> None:
        """Write a release into the table of the client, before it happens. BudgetError: it would cost too much."""
        spent = [*_read(client.state.spent), spend]
        cost = epsilon_of(spent, self._terms.delta)
        if cost > self._terms.epsilon * SLACK:
            raise BudgetError(
                f"client {client.card.id} has used up its privacy budget: this work would spend epsilon {cost:.3g}, "
                f"and {self._terms.epsilon:g} is allowed (--dp-epsilon)."
            )
        client.state.spent = _write(spent)

    def _randomness(self, client: Client, *key: draws.Key) -> Randomness:
        seed = None if self._terms.secure else client.draw("privacy", client.fits, *key).initial_seed()
        return Randomness(seed, client.device)


def choose_noise(terms: Terms, plan: Plan) -> tuple[float, float]:
    """The noise multipliers of training and of class sums with which a budget lasts for all that is planned.

    Class sums and counts alone may spend a share of epsilon. Training gets what they leave of the whole.
    """
    releases = plan.releases
    sums = 0.0
    if terms.noise == 0:
        return 0.0, 0.0
    if releases:
        share = terms.epsilon * (terms.share if plan.steps else 1.0)
        sums = find_noise(share, terms.delta, lambda noise: [Spend(noise, 1.0, releases)])
    if terms.noise is not None or not plan.steps:
        return terms.noise or 0.0, sums
    return find_noise(terms.epsilon, terms.delta, lambda noise: plan.whole(noise, sums)), sums


def _normal(randomness: Randomness, shape: tuple[int, ...], like: Tensor) -> Tensor:
    noise = torch.empty(shape, device=like.device)
    randomness.fill_normal(noise)
    return noise


def _read(table: Tensor) -> list[Spend]:
    return [Spend(noise, rate, int(times)) for noise, rate, times in table.tolist() if times]


def _write(spends: Iterable[Spend]) -> Tensor:
    """The table of these releases, those of one kind together."""
    kinds: dict[tuple[float, float], int] = {}
    for one in spends:
        kinds[one.noise, one.rate] = kinds.get((one.noise, one.rate), 0) + one.times
    if len(kinds) > MOST_KINDS:
        raise ConflictError(f"a client has more than {MOST_KINDS} kinds of private work: use one batch size for all.")
    table = torch.zeros(MOST_KINDS, 3, dtype=torch.float64)
    for row, ((noise, rate), times) in zip(table, kinds.items(), strict=False):
        row.copy_(torch.tensor([noise, rate, times], dtype=torch.float64))
    return table

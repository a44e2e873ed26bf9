"""Row-level privacy of one client: private training, noised class sums and counts, and what all of it costs.

Everything that a client sends is computed from its rows by these three mechanisms, or from their results and public
rows, which costs nothing more. What it has spent is part of its state: a table of releases, saved with its weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pluribus.client import Client
from pluribus.data.federated import Data
from pluribus.errors import MismatchError
from pluribus.internal.batches import Batch
from pluribus.internal.steps import Descent, Finish, RowStep, Step, sweep_sizes
from pluribus.method import Method
from pluribus.ops import onehot
from pluribus.privacy.account import Account, read_spends
from pluribus.privacy.accountant import Spend, find_noise
from pluribus.privacy.check import check_client, check_releases, try_step
from pluribus.privacy.plan import Plan, measure_plan
from pluribus.privacy.rows import clip_factors, collecting, optimizers_of, sums_of, tallies
from pluribus.privacy.sampling import Randomness, draw_batches
from pluribus.privacy.terms import Terms

HELD = 2.0  # standard deviations: a class with a smaller noised count is taken for one that the client does not hold


class RowGuard(Account):
    """Protects the rows of the clients of a host. One row more or less changes little of what a client sends."""

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self._plans: dict[int, Plan] = {}
        self._noise: dict[Plan, tuple[float, float]] = {}  # of training, and of class sums
        self._own: dict[int, Tensor] = {}  # private rows of each client, sorted

    # ---- what the host calls -----------------------------------------------------------------------------------------

    def attach(self, client: Client) -> None:
        super().attach(client)
        client.guard = self

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
        if not self.terms.transparent:
            check_releases(method, client, plan)
            self.check_first_round(client, plan.round(*self._choose_noise(plan)))

    def affords_round(self, client: Client) -> bool:
        """Whether the budget of a client allows one more round."""
        if self.terms.transparent:
            return True
        plan = self._plans[client.card.id]
        training, sums = self._choose_noise(plan)
        return self.affords(client, plan.round(training, sums))

    def _choose_noise(self, plan: Plan) -> tuple[float, float]:
        if plan not in self._noise:
            self._noise[plan] = choose_noise(self.terms, plan)
        return self._noise[plan]

    # ---- training ----------------------------------------------------------------------------------------------------

    def protects(self, client: Client, data: Data) -> bool:
        if self.terms.transparent:
            return False
        k = client.card.id
        if k not in self._own:
            self._own[k] = client.data["train"].rows.sort().values
        own = self._own[k]
        place = torch.searchsorted(own, data.rows).clamp(max=len(own) - 1)
        return bool((own[place] == data.rows).any())

    def fit(self, client: Client, step: Step, data: Data, batch: int, steps: int, augment: bool) -> None:
        terms, rows = self.terms, len(data)
        noise, _ = self._choose_noise(self._plans[client.card.id])
        self.charge(client, Spend(noise, min(1.0, batch / rows), steps))
        randomness = self.randomness(client, client.fits, "training")
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
        if self.terms.transparent:
            return members.T @ values, members.sum(0)
        clip = self.terms.sums_clip
        noise, randomness = self._release(client)
        deviation = math.sqrt(2) * noise
        values = values.float()
        clipped = values * clip_factors(torch.linalg.vector_norm(values, dim=1), clip)[:, None]
        sums = members.T @ clipped + deviation * clip * _normal(randomness, (members.shape[1], values.shape[1]), values)
        counts = members.sum(0) + deviation * _normal(randomness, (members.shape[1],), values)
        held = counts >= max(0.5, HELD * deviation)
        return sums * held[:, None], counts * held

    def class_counts(self, client: Client, members: Tensor) -> Tensor:
        if self.terms.transparent:
            return members.sum(0)
        noise, randomness = self._release(client)
        counts = members.sum(0) + noise * _normal(randomness, (members.shape[1],), members)
        return counts * (counts >= max(0.5, HELD * noise))

    def _release(self, client: Client) -> tuple[float, Randomness]:
        """Pay for a release of class sums or counts. Returns its noise multiplier, and where noise comes from."""
        _, noise = self._choose_noise(self._plans[client.card.id])
        self.charge(client, Spend(noise, 1.0, 1))
        times = sum(one.times for one in read_spends(client.state.spent))  # another key for each release
        return noise, self.randomness(client, client.fits, "sums", times)


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

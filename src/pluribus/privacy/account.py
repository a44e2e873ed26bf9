"""What the clients of a host have spent: a table of releases in each client's state, saved with its weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pluribus import draws
from pluribus.client import Client
from pluribus.errors import BudgetError, ConflictError
from pluribus.privacy.accountant import Spend, epsilon_of
from pluribus.privacy.sampling import Randomness
from pluribus.privacy.terms import Terms

MOST_KINDS = 16  # of releases of one client: noise and sampling rate
SLACK = 1 + 1e-6  # of epsilon: sums in another order round differently


class Account:
    """Writes down every release before it happens, and refuses one that costs too much."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def attach(self, client: Client) -> None:
        """Give a new client a table of what it has spent. Before `State.fix`."""
        client.state.spent = torch.zeros(MOST_KINDS, 3, dtype=torch.float64)

    def epsilon(self, client: Client) -> float:
        """What a client has spent so far."""
        return epsilon_of(read_spends(client.state.spent), self.terms.delta)

    def affords(self, client: Client, more: Iterable[Spend]) -> bool:
        """Whether the budget of a client allows more releases."""
        after = [*read_spends(client.state.spent), *more]
        return epsilon_of(after, self.terms.delta) <= self.terms.epsilon * SLACK

    def check_first_round(self, client: Client, spends: Iterable[Spend]) -> None:
        """Refuse noise with which the budget does not last for one round."""
        cost = epsilon_of(spends, self.terms.delta)
        if cost > self.terms.epsilon * SLACK:
            raise BudgetError(
                f"client {client.card.id} would spend epsilon {cost:.3g} in one round, and {self.terms.epsilon:g} is "
                f"allowed (--dp-epsilon): use a larger --dp-noise, or leave it out."
            )

    def charge(self, client: Client, spend: Spend) -> None:
        """Write a release into the table of the client, before it happens. BudgetError: it would cost too much."""
        spent = [*read_spends(client.state.spent), spend]
        cost = epsilon_of(spent, self.terms.delta)
        if cost > self.terms.epsilon * SLACK:
            raise BudgetError(
                f"client {client.card.id} has used up its privacy budget: this work would spend epsilon {cost:.3g}, "
                f"and {self.terms.epsilon:g} is allowed (--dp-epsilon)."
            )
        client.state.spent = _write(spent)

    def randomness(self, client: Client, *key: draws.Key, on: str | torch.device | None = None) -> Randomness:
        """Where the noise of a release comes from. Default: on the device of the client."""
        seed = None if self.terms.secure else client.draw("privacy", *key).initial_seed()
        return Randomness(seed, client.device if on is None else torch.device(on))


def read_spends(table: Tensor) -> list[Spend]:
    """The releases of a table."""
    return [Spend(noise, rate, int(times)) for noise, rate, times in table.tolist() if times]


def choose_larger(one: Tensor, other: Tensor) -> Tensor:
    """Of two tables of a client, the one with more releases: an account only grows."""
    return one if one[:, 2].sum() >= other[:, 2].sum() else other


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

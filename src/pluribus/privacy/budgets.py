"""What the clients of a run have spent of their privacy budgets, as they say themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pluribus.request import Spent


class Budgets:
    """The spending of each client, and who can afford no other round."""

    def __init__(self) -> None:
        self.epsilon: dict[int, float] = {}
        self.spent: set[int] = set()
        self._new: set[int] = set()  # clients that worked in this round

    def note(self, client: int, spent: Spent | None) -> None:
        """Note what a client says after its work."""
        if spent is None:
            return
        self.epsilon[client] = spent.epsilon
        self._new.add(client)
        if not spent.affords_round:
            self.spent.add(client)

    def take_record(self) -> dict[str, Any]:
        """What a round writes down: the epsilon of the clients that worked in it, and who has no budget left.

        Nothing in a run without privacy.
        """
        new, self._new = sorted(self._new), set()
        if not new:
            return {}
        epsilon = {str(k): self.epsilon[k] for k in new}
        return {"privacy": {"epsilon": epsilon, "used_up": [k for k in new if k in self.spent]}}

    def restore(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Continue from the rounds of a run so far."""
        for record in history:
            found = record.get("privacy", {})
            self.epsilon |= {int(k): value for k, value in found.get("epsilon", {}).items()}
            self.spent |= set(found.get("used_up", ()))


def epsilon_of_run(history: Iterable[Mapping[str, Any]]) -> float | None:
    """The largest epsilon that a client has spent. None: the run has no privacy."""
    budgets = Budgets()
    budgets.restore(history)
    return max(budgets.epsilon.values(), default=None)

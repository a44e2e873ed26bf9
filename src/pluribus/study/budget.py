"""How many rounds give every method the same number of gradient steps per client."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pluribus.api import run
from pluribus.errors import ConflictError, PluribusError
from pluribus.experiment import Experiment

ROUNDS = 2  # that are measured: a client's first one may hold training that no other has


@dataclass(frozen=True)
class Budget:
    """Gradient steps that a client takes in a round, more when it first takes part, and those of the warm-up."""

    once: float
    each: float
    share: float
    """Of the clients, who take part in a round."""
    warmup: float = 0.0
    """Steps of all rounds of warm-up."""

    def after(self, rounds: int) -> float:
        """Steps per client after so many rounds, as they are expected.

        >>> Budget(once=100, each=10, share=1.0).after(5), Budget(once=0, each=10, share=0.5).after(4)
        (150.0, 20.0)
        """
        began = 1 - (1 - self.share) ** rounds
        return self.warmup + self.once * began + self.each * self.share * rounds

    def rounds_for(self, steps: float, least: int) -> int:
        """The number of rounds that comes nearest, `least` or more.

        >>> Budget(once=0, each=10, share=1.0).rounds_for(154, least=4)
        15
        """
        rounds = least
        while self.after(rounds + 1) < steps:
            rounds += 1
        return min(rounds, rounds + 1, key=lambda number: abs(self.after(number) - steps))


def equal_rounds(described: Mapping[str, Experiment]) -> dict[str, int]:
    """By method, the rounds in which it takes the steps that the one with the most takes in its own."""
    with tempfile.TemporaryDirectory() as place:
        found = {
            name: _measured(one, Path(place) / str(number)) for number, (name, one) in enumerate(described.items())
        }
    most = max(budget.after(described[name].rounds) for name, budget in found.items())
    return {name: budget.rounds_for(most, described[name].rounds) for name, budget in found.items()}


def _measured(described: Experiment, place: Path) -> Budget:
    short = replace(described, rounds=ROUNDS, evaluate="participants", evaluate_every=ROUNDS, out=str(place))
    try:
        history = run(short, progress=False).history
    except PluribusError as error:
        raise type(error)(
            f"--equal-steps measures {ROUNDS} rounds of {described.method}, and cannot: {error}"
        ) from error
    warmup = sum(sum(record["steps"].values()) for record in history[:-ROUNDS]) / described.clients
    (first, _), (later, _) = means = [_mean(record["steps"]) for record in history[-ROUNDS:]]
    if not later:
        raise ConflictError(
            f"{described.method} takes no gradient step after its first round, so more rounds would not give it more: "
            f"leave out --equal-steps."
        )
    share = sum(taking for _, taking in means) / len(means) / described.clients
    return Budget(max(0.0, first - later), later, share, warmup)


def _mean(steps: Mapping[str, int]) -> tuple[float, int]:
    """Of those who took part, and how many these were."""
    return sum(steps.values()) / max(1, len(steps)), len(steps)

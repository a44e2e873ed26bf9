"""Computes the rounds that give every method the same number of gradient steps per client."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pluribus.api import run
from pluribus.errors import ConflictError, PluribusError
from pluribus.experiment import Experiment, at_constant_rate

ROUNDS = 2  # measured rounds: the first round of a client may have additional training


@dataclass(frozen=True)
class Budget:
    """Gradient steps of a client: in its first round only, in each round, and in the warm-up."""

    once: float
    each: float
    share: float  # share of the clients that participate in a round
    warmup: float = 0.0  # steps in all warm-up rounds

    def after(self, rounds: int) -> float:
        """Expected steps per client after some rounds.

        >>> Budget(once=100, each=10, share=1.0).after(5), Budget(once=0, each=10, share=0.5).after(4)
        (150.0, 20.0)
        """
        started = 1 - (1 - self.share) ** rounds
        return self.warmup + self.once * started + self.each * self.share * rounds

    def rounds_for(self, steps: float, least: int) -> int:
        """The number of rounds, at least `least`, that comes closest to some steps.

        >>> Budget(once=0, each=10, share=1.0).rounds_for(154, least=4)
        15
        """
        rounds = least
        while self.after(rounds + 1) < steps:
            rounds += 1
        return min(rounds, rounds + 1, key=lambda number: abs(self.after(number) - steps))


def equal_rounds(described: Mapping[str, Experiment]) -> dict[str, int]:
    """By method, the rounds that it needs for as many steps as the method with the most."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: _measure(one, Path(folder) / str(number)) for number, (name, one) in enumerate(described.items())
        }
    most = max(budget.after(described[name].rounds) for name, budget in found.items())
    return {name: budget.rounds_for(most, described[name].rounds) for name, budget in found.items()}


def _measure(described: Experiment, folder: Path) -> Budget:
    short = replace(
        at_constant_rate(described),
        rounds=ROUNDS,
        evaluate="participants",
        evaluate_every=ROUNDS,
        share_counts=True,  # else steps are not counted
        out=str(folder),
    )
    try:
        history = run(short, progress=False).history
    except PluribusError as error:
        raise type(error)(
            f"--equal-steps cannot measure {ROUNDS} rounds of {described.method}: {error.sentence}"
        ) from error
    warmup = sum(sum(record["steps"].values()) for record in history[:-ROUNDS]) / described.clients
    taken = [record["steps"] for record in history[-ROUNDS:]]
    first, later = (sum(steps.values()) / max(1, len(steps)) for steps in taken)  # means over participants
    if not later:
        raise ConflictError(
            f"{described.method} takes no gradient step after its first round, so more rounds give it no more steps. "
            f"Leave out --equal-steps."
        )
    share = sum(map(len, taken)) / len(taken) / described.clients
    return Budget(max(0.0, first - later), later, share, warmup)

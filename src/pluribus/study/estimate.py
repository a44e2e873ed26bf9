"""The expected time of a run, from a few training steps of each architecture on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from pluribus.assembly import Assembly
from pluribus.study.bare import BareLoop


@dataclass(frozen=True)
class Estimate:
    """Seconds of plain training and evaluation of a whole run, one client after the other.

    What a method does beside them is not included: its own losses and models, the server, messages, checkpoints.
    """

    training: float
    evaluation: float
    steps: float
    """Expected training steps of a round, of all its clients together."""

    @property
    def seconds(self) -> float:
        return self.training + self.evaluation


def estimate(parts: Assembly) -> Estimate | None:
    """Try a few steps of each architecture. None for private training, whose steps are others."""
    if parts.local.privacy is not None:
        return None
    one, loop, data = parts.experiment, BareLoop(parts), parts.data
    largest: dict[str, int] = {}  # the client with the most rows, whose batches are full, by model
    for k in parts.cards:
        now = largest.setdefault(parts.cards[k].model, k)
        if data.samples(k) > data.samples(now):
            largest[parts.cards[k].model] = k
    paces = {model: loop.pace(k) for model, k in largest.items()}
    share = one.sampled() / parts.task.clients * (1 - one.drop_rate)  # of all clients, in a round
    steps = {k: loop.steps(k) * share for k in parts.cards}
    step = sum(steps[k] * paces[parts.cards[k].model].step for k in parts.cards)
    row = sum(loop.rows(k) * paces[parts.cards[k].model].row for k in parts.cards)
    rounds = parts.task.rounds - parts.task.warmup
    evaluated = -(-rounds // one.evaluate_every)
    return Estimate(step * rounds, row * evaluated * (1 if one.evaluates_everyone() else share), sum(steps.values()))

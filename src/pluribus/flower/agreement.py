"""What a server and its sites agree on: it travels with every request, so that a site may start at any time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pluribus import __version__
from pluribus.client import Local
from pluribus.errors import ConfigError, MessageError, unknown
from pluribus.experiment import Experiment, fitted
from pluribus.method import Method, hyperparameters, methods
from pluribus.optim import Rule
from pluribus.task import Task


@dataclass(frozen=True)
class Agreement:
    """Plain facts, equal for all sites of a run. No private byte is in it."""

    run: str
    method: str
    hyper: Mapping[str, Any]
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    width: int | None
    projector: str
    clients: int
    rounds: int
    seed: int
    rule: Rule
    epochs: int
    batch: int
    public: tuple[int, ...] = ()
    """How many public images each client gave, where there are public images."""
    public_digest: str = ""
    version: str = __version__

    @classmethod
    def of_experiment(
        cls, one: Experiment, run: str, classes: tuple[str, ...], shape: tuple[int, int, int]
    ) -> Agreement:
        """What an experiment says of training, for these classes and images."""
        return cls(
            run=run,
            method=one.method,
            hyper=hyperparameters(one.build_method()),
            classes=classes,
            shape=shape,
            width=one.width,
            projector=one.projector,
            clients=one.clients,
            rounds=one.rounds,
            seed=one.seed,
            rule=Rule(one.optimizer, one.lr, one.momentum, one.weight_decay, one.lr_decay),
            epochs=one.epochs,
            batch=one.batch_size,
        )

    def facts(self) -> dict[str, Any]:
        """As it travels."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Agreement:
        """From what came, checked."""
        if facts.get("version") != __version__:
            raise MessageError(
                f"the server runs Pluribus {facts.get('version')}, this site {__version__}: install the same version."
            )
        try:
            whole = {name: _whole(facts[name]) for name in ("clients", "rounds", "seed", "epochs", "batch")}
            given = (
                dict(facts)
                | whole
                | {
                    "width": None if facts["width"] is None else _whole(facts["width"]),
                    "classes": tuple(map(str, facts["classes"])),
                    "shape": tuple(map(_whole, facts["shape"])),
                    "public": tuple(map(_whole, facts["public"])),
                    "rule": Rule(**facts["rule"]),
                }
            )
            agreed = cls(**given)
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"what the server agrees on cannot be read ({error}).") from error
        counts = agreed.clients, agreed.rounds, agreed.batch, *agreed.shape, 1 if agreed.width is None else agreed.width
        if len(agreed.shape) != 3 or len(agreed.classes) < 2 or min(counts) < 1:
            raise MessageError("what the server agrees on makes no sense.")
        return agreed

    def build_method(self) -> Method:
        """By its registered name alone: a name that the server chooses must not decide what a site imports."""
        known = methods()
        if self.method not in known:
            raise unknown("method", self.method, known, "pluribus list methods")
        try:
            return known[self.method](**fitted(known[self.method], dict(self.hyper)))
        except TypeError as error:
            raise ConfigError(f"{self.method} as the server has it does not fit this site's ({error}).") from error

    def task(self) -> Task:
        """What all parties agree on."""
        return Task(
            classes=len(self.classes),
            shape=self.shape,
            width=self.width,
            projector=self.projector,
            clients=self.clients,
            rounds=self.rounds,
            seed=self.seed,
            names=self.classes,
        )

    def local(self) -> Local:
        """How clients train."""
        return Local(self.rule, self.epochs, self.batch)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return value

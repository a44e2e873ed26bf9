"""What a server and its sites agree on: it travels with every request, so that a site may start at any time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pluribus import __version__
from pluribus.client import Local
from pluribus.data.augment import AUGMENTATIONS, augmentations
from pluribus.errors import AgreementError, SchemaError, unknown
from pluribus.experiment import Experiment
from pluribus.method import Method, hyperparameters, methods
from pluribus.models import entries
from pluribus.optim import Life, Rule
from pluribus.settings import fitted
from pluribus.task import Card, Task

MOST = 1_000_000  # clients, rounds, epochs, samples of a batch, sides of an image
LEAST = {"clients": 1, "rounds": 1, "epochs": 0, "batch": 1}
MOST_SHOWN = 1000
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # a site names a folder after it


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
    optimizer_life: Life = "round"
    augment: tuple[str, ...] = ()
    """Random changes to training images."""
    warmup: int = 0
    """Rounds before `rounds`, in which no model trains."""
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
            optimizer_life=one.optimizer_life,
            augment=augmentations(one.augment),
            warmup=one.build_method().warmup_rounds(),
        )

    def facts(self) -> dict[str, Any]:
        """As it travels."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, facts: Any) -> Agreement:
        """From what came, checked."""
        if not isinstance(facts, dict):
            raise SchemaError("the request does not say what the server agrees on.")
        if (version := facts.get("version")) != __version__:
            raise AgreementError(
                f"the server runs Pluribus {shown(version)}, this site {__version__}: install the same version."
            )
        try:
            counts = {name: whole(facts[name], least, MOST) for name, least in LEAST.items()}
            texts = {name: _text(facts[name]) for name in ("run", "method", "projector", "public_digest")}
            channels, height, width = facts["shape"]
            others = {
                "hyper": dict(facts["hyper"]),
                "classes": tuple(map(_text, facts["classes"])),
                "shape": (whole(channels, 1, MOST), whole(height, 1, MOST), whole(width, 1, MOST)),
                "width": None if facts["width"] is None else whole(facts["width"], 1, MOST),
                "seed": whole(facts["seed"]),
                "rule": Rule(**fitted(Rule, facts["rule"])),
                # a state folder may be older than these two
                "warmup": whole(facts.get("warmup", 0), 0, MOST),
                "augment": tuple(map(_text, facts.get("augment", ()))),
                "public": tuple(whole(size, 0) for size in facts["public"]),
            }
            agreed = cls(**facts | counts | texts | others)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SchemaError(f"what the server agrees on cannot be read ({shown(error)}).") from error
        if problem := agreed._problem():
            raise SchemaError(f"what the server agrees on makes no sense: {problem}.")
        return agreed

    def _problem(self) -> str | None:
        rule = self.rule
        if not RUN.fullmatch(self.run):
            return f"a run is named with letters, digits, '.', '_' and '-', not '{shown(self.run)}'"
        if len(self.classes) < 2:
            return "there must be at least 2 classes"
        if self.optimizer_life not in get_args(Life):
            return f"optimizers live for a round or for the run, not '{shown(self.optimizer_life)}'"
        if min(rule.lr, rule.decay) <= 0 or min(rule.momentum, rule.weight_decay) < 0:
            return "learning rate and its decay must be above 0, momentum and weight decay at least 0"
        if not set(self.augment) <= set(AUGMENTATIONS):
            return f"images are changed by {', '.join(AUGMENTATIONS)}, not by '{shown(','.join(self.augment))}'"
        return None

    def build_method(self) -> Method:
        """By its registered name alone: a name that the server chooses must not decide what a site imports."""
        known = methods()
        if self.method not in known:
            raise unknown("method", self.method, known, "pluribus list methods")
        for value in self.hyper.values():
            if isinstance(value, str) and "." in value:  # no choice has a dot, but the dotted path of a model has
                known_model(value)
        try:
            return known[self.method](**fitted(known[self.method], dict(self.hyper)))
        except (TypeError, KeyError) as error:
            raise AgreementError(
                f"{self.method} as the server has it does not fit this site's ({shown(error)})."
            ) from error

    def task(self) -> Task:
        """What all clients agree on."""
        return Task(
            classes=len(self.classes),
            shape=self.shape,
            width=self.width,
            projector=self.projector,
            clients=self.clients,
            rounds=self.warmup + self.rounds,
            seed=self.seed,
            names=self.classes,
            public=dict(enumerate(self.public)),
            warmup=self.warmup,
        )

    def card(self, client: int, model: str, samples: int) -> Card:
        """The card of a client with this model."""
        built = self.task().shape_of(model)
        return Card(client, model, samples, built.width, tuple(tuple(p.shape) for p in built.head.parameters()))

    def local(self) -> Local:
        """How clients train."""
        return Local(self.rule, self.epochs, self.batch, life=self.optimizer_life, augment=self.augment)


def known_model(name: Any) -> str:
    """By its registered name alone: what one party says must not decide what another imports."""
    if not isinstance(name, str) or name not in entries():
        raise AgreementError(f"model '{shown(name)}' is none that all parties know: use one of pluribus list models.")
    return name


def whole(value: Any, least: int | None = None, most: int | None = None) -> int:
    """A whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"'{shown(value)}' is no whole number")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{value} is out of range")
    return value


def shown(said: Any) -> str:
    """What another party said, fit for a line of a log: short, and without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(said)[:MOST_SHOWN])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"'{shown(value)}' is no text")
    return value

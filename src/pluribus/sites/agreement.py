"""What a server and its sites agree on. Every request contains it, so that a site may start at any time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pluribus import __version__
from pluribus.client import Local
from pluribus.data.augment import AUGMENTATIONS, parse_augmentations
from pluribus.errors import AgreementError, ConflictError, SchemaError, unknown
from pluribus.experiment import Experiment
from pluribus.inputs import Input
from pluribus.internal.metrics import METRICS, asks_for_confusion, choose_metrics
from pluribus.method import Method, hyperparameters, methods
from pluribus.models import entries
from pluribus.optim import Life, Rule
from pluribus.settings import convert_fields
from pluribus.task import Card, Task

MOST = 1_000_000  # clients, rounds, epochs, samples of a batch, sides of an image
LEAST = {"clients": 1, "rounds": 1, "epochs": 0, "batch": 1}
MOST_SHOWN = 1000
Shape = tuple[int, int, int]
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # also the name of a folder at each site


@dataclass(frozen=True)
class Agreement:
    """Facts that are equal for all sites of a run. They contain no private data."""

    run: str
    method: str
    hyper: Mapping[str, Any]
    classes: tuple[str, ...]
    shape: Shape
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
    warmup: int = 0  # rounds before the first of `rounds`, in which no model is trained
    public: tuple[int, ...] = ()  # number of public images of each client; empty: there are none
    public_digest: str = ""
    metrics: tuple[str, ...] = ("accuracy",)  # the headline first
    version: str = __version__

    @classmethod
    def of_experiment(cls, one: Experiment, run: str, classes: tuple[str, ...], shape: Shape) -> Agreement:
        """Make the agreement for an experiment with these classes and images."""
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
            rule=one.rule(),
            epochs=one.epochs,
            batch=one.batch_size,
            optimizer_life=one.optimizer_life,
            augment=parse_augmentations(one.augment),
            warmup=one.build_method().warmup_rounds(),
            metrics=metrics_of_sites(one),
        )

    def facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, facts: Any) -> Agreement:
        """Read and check an agreement from another machine."""
        if not isinstance(facts, dict):
            raise SchemaError("the request has no agreement.")
        if (version := facts.get("version")) != __version__:
            raise AgreementError(
                f"the server runs Pluribus {sanitize(version)}, this site {__version__}: install the same version."
            )
        try:
            counts = {name: check_integer(facts[name], least, MOST) for name, least in LEAST.items()}
            texts = {name: _text(facts[name]) for name in ("run", "method", "projector", "public_digest")}
            channels, height, width = facts["shape"]
            others = {
                "hyper": dict(facts["hyper"]),
                "classes": tuple(map(_text, facts["classes"])),
                "shape": (
                    check_integer(channels, 1, MOST),
                    check_integer(height, 1, MOST),
                    check_integer(width, 1, MOST),
                ),
                "width": None if facts["width"] is None else check_integer(facts["width"], 1, MOST),
                "seed": check_integer(facts["seed"]),
                "rule": Rule(**convert_fields(Rule, facts["rule"])),
                # an older state folder lacks these three
                "metrics": tuple(map(_text, facts.get("metrics", ("accuracy",)))),
                "warmup": check_integer(facts.get("warmup", 0), 0, MOST),
                "augment": tuple(map(_text, facts.get("augment", ()))),
                "public": tuple(check_integer(size, 0) for size in facts["public"]),
            }
            agreed = cls(**facts | counts | texts | others)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SchemaError(f"the agreement in the request cannot be read ({sanitize(error)}).") from error
        if problem := agreed._problem():
            raise SchemaError(f"the agreement in the request is invalid: {problem}.")
        return agreed

    def _problem(self) -> str | None:
        rule = self.rule
        if not RUN.fullmatch(self.run):
            return f"the name of a run has letters, digits, '.', '_' and '-', not '{sanitize(self.run)}'"
        if len(self.classes) < 2:
            return "there must be at least 2 classes"
        if self.optimizer_life not in get_args(Life):
            return f"optimizer_life must be one of {', '.join(get_args(Life))}, not '{sanitize(self.optimizer_life)}'"
        if min(rule.lr, rule.decay) <= 0 or min(rule.momentum, rule.weight_decay) < 0:
            return "learning rate and its decay must be above 0, momentum and weight decay at least 0"
        if rule.factor <= 0 or rule.warmup < 0 or (rule.clip_norm is not None and rule.clip_norm <= 0):
            return "the factor of --lr-steps and the norm for clipping must be above 0, the warm-up at least 0"
        if not set(self.augment) <= set(AUGMENTATIONS):
            return f"augment takes {', '.join(AUGMENTATIONS)}, not '{sanitize(','.join(self.augment))}'"
        fit = [one.name for one in METRICS.values() if "classes" in one.targets]
        if not self.metrics or not set(self.metrics) <= set(fit):
            return f"metrics are some of {', '.join(fit)}, not '{sanitize(','.join(self.metrics))}'"
        return None

    def build_method(self) -> Method:
        """Make the method. Only registered names are allowed: the server must not choose what a site imports."""
        known = methods()
        if self.method not in known:
            raise unknown("method", self.method, known, "pluribus list methods")
        for value in self.hyper.values():
            if isinstance(value, str) and "." in value:  # only the dotted path of a model has a dot
                check_model(value)
        try:
            return known[self.method](**convert_fields(known[self.method], dict(self.hyper)))
        except (TypeError, KeyError) as error:
            raise AgreementError(
                f"the settings of {self.method} do not fit the version of this site ({sanitize(error)})."
            ) from error

    def task(self) -> Task:
        return Task(
            classes=len(self.classes),
            input=Input("image", self.shape),
            width=self.width,
            projector=self.projector,
            clients=self.clients,
            rounds=self.warmup + self.rounds,
            seed=self.seed,
            names=self.classes,
            public=dict(enumerate(self.public)),
            warmup=self.warmup,
            metrics=self.metrics,
        )

    def card(self, client: int, model: str, samples: int) -> Card:
        built = self.task().shape_of(model)
        return Card(client, model, samples, built.width, tuple(tuple(p.shape) for p in built.head.parameters()))

    def local(self) -> Local:
        return Local(self.rule, self.epochs, self.batch, life=self.optimizer_life, augment=self.augment)


def metrics_of_sites(one: Experiment) -> tuple[str, ...]:
    """The metrics that sites measure. Their predictions, which a confusion matrix needs, stay with them."""
    if asks_for_confusion(one.metrics):
        raise ConflictError("confusion needs the test predictions, but sites keep theirs: leave it out of --metrics.")
    return choose_metrics(one.metrics, "classes")


def check_model(name: Any) -> str:
    """Check that a model has a registered name: one machine must not choose what another imports."""
    if not isinstance(name, str) or name not in entries():
        raise AgreementError(
            f"model '{sanitize(name)}' is not registered at all sites: use one of pluribus list models."
        )
    return name


def check_integer(value: Any, least: int | None = None, most: int | None = None) -> int:
    """Check that a value is an integer from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"'{sanitize(value)}' is not an integer")
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{value} is out of range")
    return value


def sanitize(text: Any) -> str:
    """Text from another machine, safe for a log line: short, and without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:MOST_SHOWN])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"'{sanitize(value)}' is not a string")
    return value

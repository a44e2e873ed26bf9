"""What a server and its sites agree on. Every request contains it, so that a site may start at any time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from pluribus import __version__
from pluribus.client import Local
from pluribus.data.augment import AUGMENTATIONS, AUGMENTS, parse_augmentations
from pluribus.errors import AgreementError, ConflictError, SchemaError, unknown
from pluribus.experiment import Experiment
from pluribus.inputs import Input
from pluribus.internal.metrics import METRICS, asks_for_confusion, choose_metrics
from pluribus.method import Method, hyperparameters, methods
from pluribus.models import entries
from pluribus.models.capacity import architecture_of
from pluribus.models.hf import HF
from pluribus.models.timm import TIMM
from pluribus.models.unseen import Unseen
from pluribus.optim import Life, Rule
from pluribus.privacy.terms import Terms
from pluribus.settings import convert_fields
from pluribus.targets import CLASSES, Target, TargetKind
from pluribus.task import EQUAL, Card, Task

MOST = 1_000_000  # clients, rounds, epochs, samples of a batch
LEAST = {"clients": 1, "rounds": 1, "epochs": 0, "batch": 1}
MOST_SHOWN = 1000
MOST_WIDTH, MOST_TENSORS = 2**17, 100  # of the head of a model
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # also the name of a folder at each site


class Form(NamedTuple):
    """What the rows of all sites are. Of a table, the names of its columns, and the values of the last of them."""

    input: Input
    columns: tuple[str, ...] = ()
    categories: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Agreement:
    """Facts that are equal for all sites of a run. They contain no private data."""

    run: str
    method: str
    hyper: Mapping[str, Any]
    classes: tuple[str, ...]
    input: Input
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
    public: tuple[int, ...] = ()  # number of public rows of each client; empty: there are none
    public_digest: str = ""
    target: Target = CLASSES
    columns: tuple[str, ...] = ()  # of a table, by name; empty: by their order
    categories: tuple[tuple[str, ...], ...] = ()  # values of the last columns
    class_weights: Literal["equal", "balanced"] = "equal"
    metrics: tuple[str, ...] = ("accuracy",)  # the headline first
    privacy: Terms | None = None  # of every site; None: nothing is bounded
    share_counts: bool = True  # whether sites tell how many rows they have
    version: str = __version__

    @classmethod
    def of_experiment(
        cls, one: Experiment, run: str, classes: tuple[str, ...], form: Form, target: Target = CLASSES
    ) -> Agreement:
        """Make the agreement for an experiment with these classes and rows."""
        return cls(
            run=run,
            method=one.method,
            hyper=hyperparameters(one.build_method()),
            classes=classes,
            input=form.input,
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
            target=target,
            columns=form.columns,
            categories=form.categories,
            class_weights=one.class_weights,
            metrics=metrics_of_sites(one, target.kind),
            privacy=_terms(one),
            share_counts=one.share_counts,
        )

    def facts(self) -> dict[str, Any]:
        terms = None if self.privacy is None else self.privacy._asdict()
        return dataclasses.asdict(self) | {"privacy": terms}

    @classmethod
    def of(cls, facts: Any) -> Agreement:
        """Read and check an agreement from another machine."""
        if not isinstance(facts, dict):
            raise SchemaError("the request has no agreement.")
        if "shape" in facts and "input" not in facts:  # of an older state folder, which held images
            facts = facts | {"input": {"kind": "image", "shape": facts["shape"]}}
            del facts["shape"]
        if (version := facts.get("version")) != __version__:
            raise AgreementError(
                f"the server runs Pluribus {sanitize(version)}, this site {__version__}: install the same version."
            )
        try:
            counts = {name: check_integer(facts[name], least, MOST) for name, least in LEAST.items()}
            texts = {name: _text(facts[name]) for name in ("run", "method", "projector", "public_digest")}
            others = {
                "hyper": dict(facts["hyper"]),
                "classes": tuple(map(_text, facts["classes"])),
                "input": Input.of(facts["input"]),
                "width": None if facts["width"] is None else check_integer(facts["width"], 1, MOST),
                "seed": check_integer(facts["seed"]),
                "rule": Rule(**convert_fields(Rule, facts["rule"])),
                # an older state folder lacks these
                "metrics": tuple(map(_text, facts.get("metrics", ("accuracy",)))),
                "warmup": check_integer(facts.get("warmup", 0), 0, MOST),
                "augment": tuple(map(_text, facts.get("augment", ()))),
                "target": Target(**convert_fields(Target, facts.get("target", {}))),
                "columns": tuple(map(_text, facts.get("columns", ()))),
                "categories": tuple(tuple(map(_text, values)) for values in facts.get("categories", ())),
                "public": tuple(check_integer(size, 0) for size in facts["public"]),
                "share_counts": _yes_or_no(facts.get("share_counts", True), "share_counts"),
                "privacy": None if (terms := facts.get("privacy")) is None else Terms(**terms),
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
        if len(self.classes) < (2 if self.target.kind == "classes" else 1):
            return "there must be at least 2 classes, or 1 label or number"
        if self.columns and len(self.columns) != self.input.shape[0]:
            return f"{len(self.columns)} names of columns are not those of {self.input}"
        if tuple(map(len, self.categories)) != self.input.categories or (self.categories and not self.columns):
            return "the values of the categories, or the names of the columns, are not complete"
        if self.class_weights not in ("equal", "balanced"):
            return f"class_weights must be equal or balanced, not '{sanitize(self.class_weights)}'"
        if self.optimizer_life not in get_args(Life):
            return f"optimizer_life must be one of {', '.join(get_args(Life))}, not '{sanitize(self.optimizer_life)}'"
        if min(rule.lr, rule.decay) <= 0 or min(rule.momentum, rule.weight_decay) < 0:
            return "learning rate and its decay must be above 0, momentum and weight decay at least 0"
        if rule.factor <= 0 or rule.warmup < 0 or (rule.clip_norm is not None and rule.clip_norm <= 0):
            return "the factor of --lr-steps and the norm for clipping must be above 0, the warm-up at least 0"
        if self.privacy is not None and (problem := self.privacy.problem()):
            return f"of the terms of privacy {problem}"
        if not set(self.augment) <= set(AUGMENTATIONS):
            return f"augment takes {', '.join(AUGMENTATIONS)}, not '{sanitize(','.join(self.augment))}'"
        if wrong := [name for name in self.augment if AUGMENTS[name] != self.input.kind]:
            return f"augment '{wrong[0]}' does not change {self.input}"
        fit = [one.name for one in METRICS.values() if self.target.kind in one.targets]
        if not self.metrics or not set(self.metrics) <= set(fit):
            return f"metrics are some of {', '.join(fit)}, not '{sanitize(','.join(self.metrics))}'"
        return None

    def build_method(self, allow: Collection[str] | None = ()) -> Method:
        """Make the method. Only registered names are allowed: the server must not choose what a site imports.

        A hyper-parameter may name a model by a dotted path of `allow`. None: this machine has chosen all of them.
        """
        known = methods()
        if self.method not in known:
            raise unknown("method", self.method, known, "pluribus list methods")
        for value in self.hyper.values():
            # only the dotted path of a model has a dot, and only the name of a model elsewhere (timm:, hf:) a colon
            named = isinstance(value, str) and ("." in value or ":" in value)
            if named and allow is not None and value not in allow:
                check_model(value, ", or name it under 'allow' in site.toml")
        try:
            return known[self.method](**convert_fields(known[self.method], dict(self.hyper)))
        except (TypeError, KeyError) as error:
            raise AgreementError(
                f"the settings of {self.method} do not fit the version of this site ({sanitize(error)})."
            ) from error

    def task(
        self,
        weights_of: Mapping[str, str] = MappingProxyType({}),
        unseen: Mapping[str, Unseen] = MappingProxyType({}),
    ) -> Task:
        """What all sites agree on, with the weights of this machine's models and the models of other machines."""
        return Task(
            classes=len(self.classes),
            input=self.input,
            width=self.width,
            projector=self.projector,
            clients=self.clients,
            rounds=self.warmup + self.rounds,
            seed=self.seed,
            names=self.classes,
            public=dict(enumerate(self.public)),
            warmup=self.warmup,
            target=self.target,
            weights_of=dict(weights_of),
            unseen=unseen,
            metrics=self.metrics,
            share_counts=self.share_counts,
        )

    def local(self) -> Local:
        how: dict[str, Any] = {"life": self.optimizer_life, "class_weights": self.class_weights}
        how["privacy"] = self.privacy
        return Local(self.rule, self.epochs, self.batch, augment=self.augment, **how)


def _terms(one: Experiment) -> Terms | None:
    """The terms of privacy of every site. Noise by the seed, which all sites know, would hide nothing from them."""
    terms = one.privacy()
    if terms is not None and terms.level == "client-central":
        raise ConflictError(
            "--dp-level client-central trusts the server with messages that have no noise: real sites need client."
        )
    return None if terms is None else terms._replace(secure=True)


def make_card(task: Task, client: int, model: str, samples: int) -> Card:
    """The card of a client with this model."""
    told = samples if task.share_counts else EQUAL
    if model in task.unseen:
        return Card(client, model, told, *task.unseen[model])
    built = task.shape_of(model)
    return Card(client, model, told, built.width, tuple(tuple(p.shape) for p in built.head.parameters()))


def metrics_of_sites(one: Experiment, target: TargetKind) -> tuple[str, ...]:
    """The metrics that sites measure. Their predictions, which a confusion matrix needs, stay with them."""
    if asks_for_confusion(one.metrics):
        raise ConflictError("confusion needs the test predictions, but sites keep theirs: leave it out of --metrics.")
    return choose_metrics(one.metrics, target)


def check_model(name: Any, remedy: str = "") -> str:
    """Check that a model has a registered name: one machine must not choose what another imports."""
    if not isinstance(name, str) or architecture_of(name) not in entries():
        raise AgreementError(
            f"model '{sanitize(name)}' is not registered at all sites: use one of pluribus list models{remedy}."
        )
    return name


def is_own(model: str) -> bool:
    """Whether only the site that names a model can build it: a dotted path, timm:NAME or hf:NAME."""
    architecture = architecture_of(model)
    return architecture not in entries() and ("." in architecture or model.startswith((TIMM, HF)))


def own_name(client: int) -> str:
    """The name of a site's own model for all others. It says nothing, and nothing can be imported by it."""
    return f"own-{client}"


def read_unseen(sent: Any) -> Unseen:
    """Read what a machine says about a model that only it can build."""
    shapes = tuple(tuple(check_integer(size, 1, MOST_WIDTH) for size in shape) for shape in sent["head"])
    if len(shapes) > MOST_TENSORS:
        raise ValueError(f"a head of {len(shapes)} tensors")
    return Unseen(check_integer(sent["width"], 1, MOST_WIDTH), shapes)


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


def _yes_or_no(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not '{sanitize(value)}'")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"'{sanitize(value)}' is not a string")
    return value

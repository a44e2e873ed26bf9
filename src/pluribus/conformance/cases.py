"""Tiny experiments that suit a method, by its needs. Each is run once, and all promises look at it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from pluribus import api
from pluribus.assembly import Assembly, assemble
from pluribus.conformance.digits import FEW, NORMED
from pluribus.conformance.kinds import Sample
from pluribus.experiment import Experiment, experiment
from pluribus.federation import Observer
from pluribus.internal.ledger import Ledger
from pluribus.method import Method, Need, find, hyperparameters, name_of, takes_one_model
from pluribus.result import Result

T = TypeVar("T")

TINY = {"data": FEW, "clients": 4, "rounds": 2, "lr": 0.05, "device": "cpu", "threads": 1, "workers": 1}
TINY |= {"evaluate_every": 1, "checkpoint_every": 1}

# Hyper-parameters that some methods have, and values that suit the shortest of runs.
SHORT = {
    "matched_batch": 10**6,  # a bandwidth that pays for a model every round
    "pretrain_public": 2,
    "pretrain_private": 2,
    "head_epochs": 2,
    "finetune_epochs": 2,
    "server_epochs": 5,
    "generator_steps": 5,
    "server_steps": 5,
    "warmup": 0,
}

# Models for a case: those of most methods, and those of methods that need pretrained backbones.
MIXED = "small", "tiny"
PAIR = "mlp-64,cnn-16-32", "tiny-vit-32,tiny-cnn-64"
ALONE = "cnn-16", "tiny-vit-32"
STATISTICS = NORMED, "tiny-cnn-64"


def fitting_settings(method: str | Method | type[Method]) -> dict[str, Any]:
    """Settings that are small, that the method can work with, and under which a checkpoint follows every round."""
    cls = class_of(method)
    settings = TINY | {"models": models_for(cls, MIXED)}
    if cls.capacity == "depth":  # a default for the method's own model, which is named here
        settings["capacity"] = cls.defaults.get("capacity", "")
    if "image_size" in cls.defaults or Need.PRETRAINED in cls.needs:
        settings["image_size"] = cls.defaults.get("image_size", 16)
    if {Need.PUBLIC_DATA, Need.PUBLIC_AT_SERVER} & cls.needs and not cls.defaults.get("public_fraction"):
        settings["public_fraction"] = 0.2
    if not isinstance(method, Method):  # an instance has the hyper-parameters that its user wants
        settings |= {name: SHORT[name] for name in getattr(cls, "__dataclass_fields__", ()) if name in SHORT}
    return settings


def models_for(cls: type[Method], models: tuple[str, str]) -> Any:
    """Those of two settings that suit the method; its own default if all clients need one model."""
    pretrained = Need.PRETRAINED in cls.needs
    if takes_one_model(cls) and (pretrained or models != STATISTICS or cls.capacity == "depth"):  # few have stages
        return cls.defaults.get("models", ALONE[pretrained])
    return models[pretrained]


def settings_on(sample: Sample, cls: type[Method]) -> dict[str, Any]:
    """The settings of a method on data of another kind, with models for it."""
    normed, pretrained = (need in cls.needs for need in (Need.BATCH_NORM, Need.PRETRAINED))
    return sample.settings_for(takes_one_model(cls), normed, cls.capacity == "depth", pretrained)


def class_of(method: str | Method | type[Method]) -> type[Method]:
    """The class of a method, found by its name even if it is given: this refuses what a run refuses."""
    if isinstance(method, str):
        return find(method)
    return find(name_of(method if isinstance(method, type) else type(method)))


class Case:
    """One tiny experiment with a method. Cases that differ in settings share their runs."""

    def __init__(
        self,
        method: str | Method | type[Method],
        scratch: Path,
        settings: Mapping[str, Any] | None = None,
        known: dict[Any, Any] | None = None,
        cls: type[Method] | None = None,
    ) -> None:
        self.method, self._scratch = method, scratch
        self.cls = cls or class_of(method)
        self.settings = fitting_settings(method) if settings is None else settings
        self._known: dict[Any, Any] = {} if known is None else known

    def but(self, **settings: Any) -> Self:
        """The same case with other settings. `sample` names data of another kind, with models for it."""
        before = self.settings
        if (sample := settings.pop("sample", None)) is not None:
            before = {name: value for name, value in before.items() if name not in ("image_size", "capacity")}
            settings = settings_on(sample, self.cls) | settings
        if isinstance(models := settings.get("models"), tuple):
            settings["models"] = models_for(self.cls, models)
        return type(self)(self.method, self._scratch, {**before, **settings}, self._known, self.cls)

    def once(self, make: Callable[[Self], T]) -> T:
        """What a function makes of this case, made once."""
        key = make, repr(sorted(self.settings.items()))
        if key not in self._known:
            self._known[key] = make(self)
        return self._known[key]  # type: ignore[no-any-return]

    @property
    def result(self) -> Result:
        """The run to its end."""
        return self.once(Case.run)

    def run(self, observers: Sequence[Observer] = ()) -> Result:
        """A new run to its end."""
        return api.run(self.method, progress=False, observers=observers, out=self.folder(), **self.settings)

    def run_in_two_parts(self, t: int) -> Result:
        """A new run that is stopped after round t and resumed."""
        stop = StopAfter(t)
        try:
            api.run(self.method, progress=False, observers=[stop], out=(folder := self.folder()), **self.settings)
        except StoppedError:
            return api.resume(folder, progress=False)
        raise AssertionError(f"round {t} is not before the last")

    def folder(self) -> str:
        return tempfile.mkdtemp(dir=self._scratch)

    def described(self) -> Experiment:
        return experiment(self.method, **self.settings)

    def parts(self) -> Assembly:
        """New parts of the experiment, before anything trains. Cards remember who enrolled, so nobody shares them."""
        return assemble(self.described())

    @property
    def seen_parts(self) -> Assembly:
        """Parts to look at, which nobody may change."""
        return self.once(Case.parts)

    def call(self) -> str:
        hyper = hyperparameters(self.method) if isinstance(self.method, Method) else {}
        usual = {field.name: field.default for field in dataclasses.fields(Experiment)}
        values = {**self.settings, **hyper}.items()
        given = {k: v for k, v in values if k not in usual or k in self.cls.defaults or v != usual[k]}
        del given["checkpoint_every"]  # changes no number
        words = [f'"{name_of(self.cls)}"', *(f"{k}={_literal(v)}" for k, v in given.items())]
        return _fold("pluribus.run(", words, ")")


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _fold(start: str, words: Sequence[str], end: str, width: int = 68) -> str:
    """A call in lines of this width."""
    lines = [start]
    for word in words:
        text = word + (end if word is words[-1] else ",")
        if len(lines[-1]) + len(text) + 1 > width and lines[-1] != start:
            lines.append("    " + text)
        else:
            lines[-1] += text if lines[-1] == start else f" {text}"
    return "\n".join(lines)


class StoppedError(Exception):
    """The run was stopped on purpose."""


class StopAfter(Observer):
    """An observer that stops a run once a round is saved."""

    def __init__(self, t: int) -> None:
        self.t = t

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        if record["round"] == self.t:
            raise StoppedError

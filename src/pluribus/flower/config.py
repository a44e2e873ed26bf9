"""The two files of a federation: federation.toml at the server, site.toml at each site. Mistakes get one sentence."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pluribus.errors import ConfigError
from pluribus.experiment import Experiment, check_names, experiment, fitted
from pluribus.flower.agreement import Agreement
from pluribus.optim import Rule

LOOK = "The deployment page of the documentation"
T = TypeVar("T")


@dataclass(frozen=True)
class FederationFile:
    """federation.toml: what all sites agree on, who they are, and how long a round may last."""

    method: str
    sites: list[str]
    classes: list[str]
    image: list[int]
    run: str
    rounds: int = 20
    epochs: int = 1
    batch_size: int = 10
    optimizer: Literal["sgd", "adam", "amsgrad", "adamw"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    width: int | None = None
    projector: Literal["pool", "linear", "none"] = "pool"
    seed: int = 0
    evaluate_every: int = 1
    deadline: float = 600.0
    hyper: dict[str, Any] = field(default_factory=dict)

    def agreement(self) -> Agreement:
        """What travels to the sites."""
        rule = Rule(self.optimizer, self.lr, self.momentum, self.weight_decay, self.lr_decay)
        return Agreement(
            run=self.run,
            method=self.method,
            hyper=self.hyper,
            classes=tuple(self.classes),
            shape=tuple(self.image),  # type: ignore[arg-type]
            width=self.width,
            projector=self.projector,
            clients=len(self.sites),
            rounds=self.rounds,
            seed=self.seed,
            rule=rule,
            epochs=self.epochs,
            batch=self.batch_size,
        )

    def experiment(self) -> Experiment:
        """What the round loop reads of it."""
        same = ("rounds", "epochs", "batch_size", "optimizer", "lr", "momentum", "weight_decay", "lr_decay", "seed")
        settings = {name: getattr(self, name) for name in (*same, "evaluate_every")}
        return experiment(self.method, clients=len(self.sites), checkpoint_every=1, **settings, **self.hyper)


@dataclass(frozen=True)
class SiteFile:
    """site.toml: who this site is, what it trains, and where its state lies."""

    name: str
    model: str
    state: str
    data: str | None = None
    train: str | None = None
    val: str | None = None
    test: str | None = None
    public: str | None = None
    image_size: int | None = None
    val_fraction: float = 0.1
    test_fraction: float = 0.2
    device: str = "cpu"


def read(cls: type[T], path: Path) -> T:
    """A file in the form of its dataclass."""
    try:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    check_names(written, [one.name for one in fields], f"setting in {path.name}", LOOK)
    needed = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in written]:
        raise ConfigError(f"{path} does not say '{missing[0]}'.")
    return cls(**_typed(cls, written))


def _typed(cls: type, written: Mapping[str, Any]) -> dict[str, Any]:
    return fitted(cls, written)

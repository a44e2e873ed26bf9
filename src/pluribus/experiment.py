"""An experiment: one flat dataclass that is also a TOML file and the command line. Same names, same defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pluribus.errors import ConfigError, unknown
from pluribus.folder import read_toml
from pluribus.method import Method, find, hyperparameters, name_of

Models = str | Sequence[str] | Mapping[int, str] | Callable[[int], str]


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run, except the method's own hyper-parameters (`hyper`)."""

    method: str = "fedgh"
    """Name of a method (pluribus list methods), or package.module.Class of your own."""

    data: str = "digits"
    """Name of a data set (pluribus list data), an .npz file, an image folder, or package.module.function."""
    partition: str = "dirichlet"
    """Who holds which rows (pluribus list partitions)."""
    clients: int = 8
    """N: number of clients."""
    classes_per_client: int = 2
    """Classes that each client holds (pathological partition)."""
    unequal: bool = False
    """Unequal shares of each class (pathological partition)."""
    alpha: float | None = None
    """Concentration of the Dirichlet partitions: smaller is more skewed. Unset: 1, or as FedHPL says."""
    min_samples: int = 10
    """Fewest rows that a client may hold (Dirichlet partitions)."""
    val_fraction: float = 0.1
    """Share of each client's rows for validation."""
    test_fraction: float = 0.2
    """Share of each client's rows for testing."""
    public_fraction: float = 0.0
    """Share of each client's rows that all parties know."""
    test: Literal["own", "official"] = "own"
    """Test on a share of each client's own rows, or everyone on the data set's official test set."""
    image_size: int | None = None
    """Resize images to this many pixels a side."""

    models: Any = "small"
    """A group, a model, or a comma-separated list (pluribus list groups, models); client i gets model i mod X."""
    width: int | None = None
    """K: width that features are brought to. Unset: the group's own."""
    projector: Literal["pool", "linear", "none"] = "pool"
    """How features come to width K: average pooling, a private linear layer, or not at all."""
    same_init: bool = False
    """Clients with one architecture start from the same weights."""

    rounds: int = 20
    """T: number of rounds."""
    epochs: int = 1
    """E: local epochs per round."""
    batch_size: int = 10
    """B: local batch size."""
    optimizer: Literal["sgd", "adam", "amsgrad", "adamw"] = "sgd"
    """Rule of local training."""
    lr: float = 0.01
    """eta: local learning rate."""
    momentum: float = 0.0
    """Momentum of local SGD."""
    weight_decay: float = 0.0
    """Weight decay of local training."""

    participation: float = 1.0
    """Share of clients sampled per round."""
    drop_rate: float = 0.0
    """Chance that a sampled client goes away before it trains."""
    straggler_rate: float = 0.0
    """Chance that a sampled client trains, but answers too late to be counted."""

    evaluate: Literal["auto", "all", "participants"] = "auto"
    """Who is evaluated: every client, or those that took part. auto: all, up to 200 clients."""
    evaluate_every: int = 1
    """Rounds between evaluations; the last round is always evaluated."""

    seed: int = 0
    """The one seed: weights, shuffles, sampling, partition."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    threads: int | None = None
    """CPU threads. Equal numbers are promised for equal threads."""
    checkpoint_every: int | None = None
    """Rounds between checkpoints. Unset: as often as costs at most 5 % of the time."""
    out: str | None = None
    """Run folder. Unset: a name of its own under runs/."""

    hyper: dict[str, Any] = field(default_factory=dict)
    """The method's hyper-parameters."""

    def __post_init__(self) -> None:
        for name, low in (("clients", 1), ("rounds", 1), ("epochs", 1), ("batch_size", 1), ("evaluate_every", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{flag(name)} must be at least {low}, not {getattr(self, name)}.")
        for name in ("drop_rate", "straggler_rate", "val_fraction", "test_fraction", "public_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} must be in [0, 1), not {getattr(self, name)}.")
        if not 0 < self.participation <= 1:
            raise ConfigError(f"--participation must be in (0, 1], not {self.participation}.")
        if self.val_fraction + self.test_fraction + self.public_fraction >= 1:
            raise ConfigError("--val-fraction, --test-fraction and --public-fraction leave nothing to train on.")
        if not self.lr > 0:
            raise ConfigError(f"--lr must be above 0, not {self.lr}.")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ConfigError(f"--checkpoint-every must be at least 1, not {self.checkpoint_every}.")

    def build_method(self) -> Method:
        """The method with its hyper-parameters."""
        cls = find(self.method)
        check_names(self.hyper, _field_names(cls), f"option of {self.method}", f"pluribus run {self.method} --help")
        return cls(**self.hyper)

    def settings(self) -> dict[str, Any]:
        """As plain values, for a TOML file. `out` is left out: it is where the file lies."""
        values = dataclasses.asdict(self) | {"hyper": hyperparameters(self.build_method())}
        values.pop("out")
        if callable(self.models):
            values["models"] = [self.models(k) for k in range(self.clients)]
        elif isinstance(self.models, Mapping):
            values["models"] = {str(k): name for k, name in self.models.items()}
        return values


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def experiment(
    method: str | Method | type[Method] | None, config: str | Path | None = None, **settings: Any
) -> Experiment:
    """An experiment from a method, perhaps a TOML file, and settings that override it.

    Settings are fields of Experiment or hyper-parameters of the method, side by side, as on the command line.
    """
    written = from_toml(Path(config)) if config is not None else {}
    if isinstance(method, type):
        method = name_of(method)
    elif isinstance(method, Method):
        settings = hyperparameters(method) | settings
        method = name_of(type(method))
    name = method or written.get("method") or Experiment.method
    cls = find(name)
    hyper = dict(written.pop("hyper", {})) if name == written.pop("method", name) else {}
    hyper |= {key: settings.pop(key) for key in _field_names(cls) if key in settings}
    check_names(settings, (f.name for f in dataclasses.fields(Experiment)), "setting", f"pluribus run {name} --help")
    return Experiment(method=name, hyper=hyper, **{**cls.defaults, **written, **settings})


def from_toml(path: Path) -> dict[str, Any]:
    """Settings from a TOML file; names that mean nothing are refused."""
    written = read_toml(path)
    check_names(written, (f.name for f in dataclasses.fields(Experiment)), f"setting in {path}:", "pluribus run --help")
    if isinstance(written.get("models"), dict):
        written["models"] = {int(k): name for k, name in written["models"].items()}
    return written


def _field_names(cls: type[Method]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def check_names(given: Any, known: Any, kind: str, look: str) -> None:
    """Refuse a name that is not known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise unknown(kind, name, known, look)

"""The base class of trackers: what they log of a run. A tracker that fails never stops the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pluribus.errors import PackageError, unknown
from pluribus.experiment import Experiment
from pluribus.federation import Federation
from pluribus.internal.ledger import Ledger
from pluribus.result import Result
from pluribus.storage.checks import is_text, read_table
from pluribus.storage.files import write_json

TRACKERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WandB"}


class Tracking(NamedTuple):
    """The trackers of several runs that belong together, such as those of a comparison."""

    names: str | Sequence[str] = ()
    folder: Path | None = None  # of all these runs; None: a run alone

    def make(self) -> list[Tracker]:
        trackers = make_trackers(self.names)
        for tracker in trackers:
            tracker.group = self.folder
        return trackers


def make_trackers(names: str | Iterable[str]) -> list[Tracker]:
    """Create trackers by name. Refuse a name that is unknown or not installed, before anything trains."""
    words = [word.strip() for word in names.split(",") if word.strip()] if isinstance(names, str) else list(names)
    for name in words:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS, "pluribus run --help")
    return [getattr(import_module(f"pluribus.track.{name}"), TRACKERS[name])() for name in dict.fromkeys(words)]


class Tracker(ABC):
    """An observer that logs to another program. If that program fails, the run warns once and continues."""

    name: ClassVar[str]  # name of the package, and of the extra of Pluribus that installs it
    metric: str  # name of the headline metric
    group: Path | None = None  # the folder of all runs that belong together; None: the run is alone

    def __init__(self) -> None:
        if find_spec(self.name) is None:
            raise PackageError(f"{type(self).__name__} is not installed: pip install 'pluribus[{self.name}]'.")
        self._open = False
        self._failed = False

    @abstractmethod
    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        """Start to track the run in a folder. A resumed run has some rounds `done`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a round."""

    @abstractmethod
    def end(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Log the results after the last round. None: the run stopped early."""

    def run_name(self, folder: Path) -> str:
        """Name of a run: its path below the folder of its group."""
        return folder.name if self.group is None else folder.resolve().relative_to(self.group.resolve()).as_posix()

    def tags(self, folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
        """What tells the runs of a group apart: method, seed, label, and the folder of the group."""
        if self.group is None:
            return {}
        seed = str(settings["seed"])
        label = self.run_name(folder).removesuffix(f"-{seed}").removesuffix("/seed")  # LABEL-0, or LABEL/trial-3/seed-0
        tags = {"method": str(settings["method"]), "seed": seed, "label": label}
        return tags | {"study": self.group.resolve().name}

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def start(self, federation: Federation) -> None:
        self._stop()  # the previous attempt, if the run restarts
        self._warn = federation.warn
        self.metric = federation.parts.task.metrics[0]
        self._step = len(federation.history)
        self._open = True
        self._attempt(self.begin, federation.folder.path, flatten_settings(federation.parts.experiment), self._step)

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        self._step = record["round"] + 1  # trackers count from 1
        self._attempt(self.log, self._step, round_metrics(record, ledger))

    def finish(self, result: Result) -> None:
        self._attempt(self.end, self._step, final_metrics(result))
        self._open = False

    def _stop(self) -> None:
        if self._open:
            self._attempt(self.end, self._step, None)
            self._open = False

    def _attempt(self, what: Callable[..., None], *args: Any) -> None:
        if self._failed:
            return
        try:
            what(*args)
        except Exception as error:  # any error of another program: a log must not stop a run
            self._failed = True
            reason = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
            self._warn(f"{type(self).__name__} failed and logs nothing more: {reason}.")


def flatten_settings(experiment: Experiment) -> dict[str, bool | int | float | str]:
    """All settings and hyper-parameters by name, as plain values."""
    settings = experiment.settings()
    settings |= settings.pop("hyper")
    plain = (bool, int, float, str)
    return {k: v if isinstance(v, plain) else str(v) for k, v in settings.items() if v is not None}


def round_metrics(record: Mapping[str, Any], ledger: Ledger) -> dict[str, float]:
    """Metrics of a round by name, such as `after/test/mean`. Bytes are the sum of all rounds so far."""
    metrics = {"loss": record["loss"], "seconds": record["seconds"]}
    metrics |= {f"bytes/{way}": ledger.total[way] for way in ("up", "down")}
    return _flatten(metrics, record["mean"])


def final_metrics(result: Result) -> dict[str, float]:
    """Results of the run by name: the headline by its metric, others as `selected/after/test/mean`."""
    moments = {f"{moment}/{view}": metrics for view, both in result.summary.items() for moment, metrics in both.items()}
    return _flatten({result.metric: result.score}, moments)


def _flatten(metrics: dict[str, float | None], views: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that have a value, with those of the views."""
    for view, rows in views.items():
        metrics |= {f"{view}/{metric}/{over}": value for metric, row in rows.items() for over, value in row.items()}
    return {name: float(value) for name, value in metrics.items() if value is not None}


def identity(folder: Path, tracker: str, make: Callable[[], str]) -> str:
    """Identifier of the run in a tracker. It is saved in the folder, so that a resumed run keeps it."""
    file = folder / "trackers.json"
    known: dict[str, str] = read_table(file, is_text, "Delete it: the trackers then show a new run.")
    if tracker not in known:
        known[tracker] = make()
        write_json(file, known)
    return known[tracker]

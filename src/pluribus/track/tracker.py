"""What trackers share: what they are told of a run, and that none of them can stop it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pluribus.errors import PackageError, unknown
from pluribus.experiment import Experiment
from pluribus.federation import Federation
from pluribus.internal.ledger import Ledger
from pluribus.result import Result
from pluribus.storage.files import read_json, write_json

TRACKERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WandB"}


def trackers(names: str | Iterable[str]) -> list[Tracker]:
    """Trackers by name. What is unknown or not installed is refused, before anything trains."""
    words = [word.strip() for word in names.split(",") if word.strip()] if isinstance(names, str) else names
    made: list[Tracker] = []
    for name in dict.fromkeys(words):
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS, "pluribus run --help")
        made.append(getattr(import_module(f"pluribus.track.{name}"), TRACKERS[name])())
    return made


class Tracker(ABC):
    """An observer that tells another program. If that program fails there is one warning, and the run goes on."""

    name: ClassVar[str]
    """Of the package, and of our extra that installs it."""

    def __init__(self) -> None:
        if find_spec(self.name) is None:
            raise PackageError(f"{type(self).__name__} is not installed: pip install 'pluribus[{self.name}]'.")
        self._open = False
        self._failed = False

    @abstractmethod
    def begin(self, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        """Begin to track the run in a folder, or go on after so many rounds."""

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Tell the figures of a round."""

    @abstractmethod
    def end(self, step: int, figures: Mapping[str, float] | None) -> None:
        """Tell the figures of the whole run after its last round, or none where it broke off."""

    # ---- as an observer --------------------------------------------------------------------------------------------

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self._break_off()

    def start(self, federation: Federation) -> None:
        """Begin, or go on with a run that was stopped."""
        self._break_off()  # the run before, where this one starts again
        self._warn = federation.warn
        self._step = len(federation.history)
        self._open = True
        self._attempt(self.begin, federation.folder.path, flat(federation.parts.experiment), self._step)

    def round(self, record: Mapping[str, Any], ledger: Ledger) -> None:
        """Tell the round; people count from 1."""
        self._step = record["round"] + 1
        self._attempt(self.log, self._step, figures_of(record, ledger))

    def finish(self, result: Result) -> None:
        """Tell the result."""
        self._attempt(self.end, self._step, final_figures(result))
        self._open = False

    def _break_off(self) -> None:
        if self._open:
            self._attempt(self.end, self._step, None)
            self._open = False

    def _attempt(self, what: Callable[..., None], *args: Any) -> None:
        if self._failed:
            return
        try:
            what(*args)
        except Exception as error:  # whatever another program may raise: no run is lost to its log
            self._failed = True
            reason = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
            self._warn(f"{type(self).__name__} failed and is left out from here: {reason}.")


# ---- what is told ----------------------------------------------------------------------------------------------------


def flat(experiment: Experiment) -> dict[str, bool | int | float | str]:
    """Every setting under the name of its flag, as a plain value."""
    settings = experiment.settings()
    settings |= settings.pop("hyper")
    plain = (bool, int, float, str)
    return {k: v if isinstance(v, plain) else str(v) for k, v in settings.items() if v is not None}


def figures_of(record: Mapping[str, Any], ledger: Ledger) -> dict[str, float]:
    """A round as one number per name, such as `after/test/mean`; bytes are those of all rounds so far."""
    figures = {"loss": record["loss"], "seconds": record["seconds"]}
    figures |= {f"bytes/{way}": ledger.total[way] for way in ("up", "down")}
    return _known(figures | _named(record["mean"]))


def final_figures(result: Result) -> dict[str, float]:
    """The run as one number per name: the headline, and `selected/after/test/mean` and the like."""
    moments = {f"{moment}/{view}": figures for view, both in result.summary.items() for moment, figures in both.items()}
    return _known({"accuracy": result.accuracy} | _named(moments))


def _named(views: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> dict[str, float | None]:
    return {
        f"{view}/{figure}/{over}": value
        for view, figures in views.items()
        for figure, values in figures.items()
        for over, value in values.items()
    }


def _known(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items() if value is not None}


def identity(folder: Path, tracker: str, make: Callable[[], str]) -> str:
    """By which name a tracker knows the run in a folder; kept there, so that a resumed run goes on under it."""
    file = folder / "trackers.json"
    known: dict[str, str] = read_json(file) if file.exists() else {}
    if tracker not in known:
        known[tracker] = make()
        write_json(file, known)
    return known[tracker]

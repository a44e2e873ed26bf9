"""Run folders as plain numbers: what a report shows, with no word about how it is drawn.

A run may be going on, or have been stopped: nothing here takes its lock or writes to it. What is missing or damaged is
left out, and `Run.problems` has a sentence that names the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pluribus.assembly import assemble
from pluribus.client import Client
from pluribus.data import Manifest
from pluribus.errors import DamagedFileError, DataError, FileAccessError, MissingSettingError, PluribusError
from pluribus.evaluate import Chosen, Figures, choose, over_clients, selection_text
from pluribus.experiment import Experiment, flags, from_toml
from pluribus.host import make_host
from pluribus.models import assign
from pluribus.storage.files import read_json, to_json

DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What reading a file raises that holds something else than a run writes."""

T = TypeVar("T")
Held = tuple[list[list[int]], str]  # rows per client and class, and what tells this partition from others
Traffic = dict[tuple[str, str], Counter[int]]  # (direction, tensor) -> round -> bytes


class Parameters(NamedTuple):
    """How large the clients of an architecture are: all numbers of model and state that could be trained, and those
    that the method does train."""

    model: str
    clients: int
    total: int
    trainable: int


class Facts(NamedTuple):
    """What a run folder does not hold, but its experiment knows."""

    classes: tuple[str, ...]
    parameters: tuple[Parameters, ...]


Known = dict[str, Facts | str]  # by experiment, whatever the seed; a sentence says why they cannot be had


@dataclass(frozen=True)
class Run:
    """One run, as far as it has come."""

    path: Path
    experiment: Experiment
    state: str
    """`finished`, `going on` or `stopped`."""
    history: list[dict[str, Any]]
    view: str
    """The view of the headline."""
    chosen: Mapping[int, Chosen]
    traffic: Traffic
    counts: list[list[int]]
    """Rows per client and class; empty where nobody knows, as in a federation of real hosts."""
    partition: str
    """Equal where clients hold the very same rows."""
    models: tuple[str, ...]
    """By client."""
    classes: tuple[str, ...]
    parameters: tuple[Parameters, ...]
    config: str
    commands: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    name: str = ""
    """What it is called beside the other runs of a report."""

    @property
    def accuracy(self) -> Figures:
        """Test accuracy over clients, selected on validation: `mean`, `worst` and `best`."""
        return over_clients({k: one.selected.get("test") for k, one in self.chosen.items()}, Counter())

    def cumulated(self, of: Callable[[dict[str, Any]], float]) -> list[float]:
        """Round by round, the sum of something so far."""
        total, sums = 0.0, []
        for record in self.history:
            total += of(record)
            sums.append(total)
        return sums

    def client(self, k: int) -> str:
        """A client's name in a plot: its number and its model."""
        return f"{k} {self.models[k]}" if k < len(self.models) else str(k)

    def class_name(self, number: int) -> str:
        """A class's name, or its number where the data set is not at hand."""
        return self.classes[number] if number < len(self.classes) else str(number)


def selection_of(runs: Iterable[Run]) -> str:
    """How the rounds of the accuracies of some runs were chosen, in words."""
    return selection_text(one.selected.get("val") for run in runs for one in run.chosen.values())


def read_runs(places: Iterable[str | Path], known: Known | None = None) -> list[Run]:
    """The runs in these folders and below them, each with a name of its own."""
    known = {} if known is None else known
    folders = dict.fromkeys(folder for place in places for folder in run_folders(Path(place)))
    if not folders:
        raise MissingSettingError("which run? Give the folder of a run, or a folder that holds some.")
    return _named([_read(folder, known) for folder in folders])


def run_folders(place: Path) -> list[Path]:
    """The folder itself if it is one of a run, or else all run folders below it."""
    if not place.is_dir():
        raise FileAccessError(f"there is no folder {place}: give the folder of a run.")
    if (place / "config.toml").exists():
        return [place]
    found = [path.parent for path in sorted(place.glob("**/config.toml"))]
    if not found:
        raise FileAccessError(f"{place} holds no run: neither it nor a folder below it has a config.toml.")
    return found


def _named(runs: list[Run]) -> list[Run]:
    """The shortest kind of name that tells them apart."""
    kinds: list[Callable[[Run], str]] = [
        lambda run: run.experiment.method,
        lambda run: f"{run.experiment.method}, seed {run.experiment.seed}",
        lambda run: run.path.name,
        lambda run: str(run.path),
    ]
    kind = next((kind for kind in kinds if len({kind(run) for run in runs}) == len(runs)), kinds[-1])
    return [replace(run, name=kind(run)) for run in runs]


# ---- one folder ------------------------------------------------------------------------------------------------------


@dataclass
class _Folder:
    """A folder that is being read, and what was wrong with it."""

    path: Path
    problems: list[str] = field(default_factory=list)

    def lines(self, name: str, take: Callable[[Any], None]) -> None:
        """Every line of a file of JSON, up to the first that is damaged; one that is still being written is no harm."""
        path = self.path / name
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return  # no round yet
        except OSError as error:
            self.problems.append(f"cannot read {path}: {error.strerror}.")
            return
        lines = text.split("\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                take(json.loads(line))
            except DAMAGE:
                self.problems.append(f"{path} is damaged in line {number}: it and what follows are left out.")
                return

    def guarded(self, name: str, read: Callable[[], T], otherwise: T) -> T:
        """What a file says, or something else if it cannot be had."""
        try:
            return read()
        except PluribusError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(f"cannot read {self.path / name}: {error.strerror}.")
        except DAMAGE as error:
            self.problems.append(f"{self.path / name} is damaged: {error}.")
        return otherwise


def _read(path: Path, known: Known) -> Run:
    described = Experiment(**from_toml(path / "config.toml") | {"out": str(path)})
    folder = _Folder(path)
    finished = (path / "result.json").exists()
    history: list[dict[str, Any]] = []
    folder.lines("metrics.jsonl", lambda line: history.append(_record(line)))
    if finished and not history:
        folder.problems.append(f"{path / 'metrics.jsonl'} holds no round.")
    view = next((view for record in history for view in record["mean"]), "after")
    traffic: Traffic = {}
    folder.lines("traffic.jsonl", _Ledger(traffic).take)
    unknown: Held = [], str(path)
    counts, digest = folder.guarded("partition.json", lambda: _partition(path / "partition.json"), unknown)
    facts = _facts(described, folder, known)
    return Run(
        path=path,
        experiment=described,
        state="finished" if finished else "going on" if in_use(path) else "stopped",
        history=history,
        view=view,
        chosen=folder.guarded("metrics.jsonl", lambda: choose(history, view), {}),
        traffic=traffic,
        counts=counts,
        partition=digest,
        models=folder.guarded("config.toml", lambda: assign(described.models, described.clients), ()),
        classes=facts.classes,
        parameters=facts.parameters,
        config=(path / "config.toml").read_text(encoding="utf-8"),
        commands=_commands(path, described, bool(counts), finished),
        warnings=folder.guarded("result.json", lambda: _warnings(path / "result.json"), ()) if finished else (),
        problems=tuple(folder.problems),
    )


def _record(line: Mapping[str, Any]) -> dict[str, Any]:
    """A round, every part of it in the type that it must have."""
    return {
        "round": int(line["round"]),
        "seconds": float(line["seconds"]),
        "bytes": {way: int(line["bytes"][way]) for way in ("up", "down")},
        "loss": _number(line["loss"]),
        "mean": {view: {name: _figures(row) for name, row in rows.items()} for view, rows in line["mean"].items()},
        "clients": {
            str(int(k)): {view: _figures(row) for view, row in views.items()} for k, views in line["clients"].items()
        },
        "notes": dict(line.get("notes") or {}),
    }


def _figures(row: Mapping[str, Any]) -> Figures:
    return {name: _number(value) for name, value in row.items()}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


@dataclass
class _Ledger:
    """Sums what travelled, line by line."""

    sums: Traffic
    layouts: list[dict[str, int]] = field(default_factory=list)

    def take(self, line: Mapping[str, Any]) -> None:
        """A layout, or a transfer that has one."""
        if "tensors" in line:
            self.layouts.append({name: int(size) for name, size in line["tensors"].items()})
            return
        t, way, layout = int(line["round"]), str(line["direction"]), self.layouts[line["layout"]]
        for tensor, size in layout.items():
            self.sums.setdefault((way, tensor), Counter())[t] += size


def _partition(path: Path) -> Held:
    if not path.exists():
        return [], str(path)  # a federation of real hosts: nobody knows
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
    except DataError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error
    return [[int(count) for count in row] for row in manifest.counts], str(manifest.digest)


def _warnings(path: Path) -> tuple[str, ...]:
    return tuple(str(sentence) for sentence in read_json(path)["warnings"])


def in_use(path: Path) -> bool:
    """Whether a process holds the run's lock."""
    try:
        with (path / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _commands(path: Path, described: Experiment, simulated: bool, finished: bool) -> tuple[str, ...]:
    """How to run it again, and how to go on with it."""
    if not simulated:
        return (f"pluribus serve {shlex.quote(described.method)} --config federation.toml",)
    words = [] if finished else [["pluribus", "resume", str(path)]]
    words.append(["pluribus", "run", "--config", str(path / "config.toml")])
    with contextlib.suppress(PluribusError):  # a method of the user's own that is not at hand
        words.append(["pluribus", "run", described.method, *flags(described)])
    return tuple(shlex.join(command) for command in words)


# ---- what the experiment knows ---------------------------------------------------------------------------------------


def _facts(described: Experiment, folder: _Folder, known: Known) -> Facts:
    """Looked up once for all seeds: a model has the same size for each."""
    key = to_json({name: str(value) for name, value in vars(described).items() if name not in ("seed", "out")})
    if key not in known:
        try:
            known[key] = _found(described)
        except PluribusError as error:
            known[key] = f"class names and numbers of parameters are missing, the experiment cannot be set up: {error}"
    found = known[key]
    if isinstance(found, Facts):
        return found
    folder.problems.append(found)
    return Facts((), ())


def _found(described: Experiment) -> Facts:
    parts = assemble(replace(described, device="cpu", workers=1))
    host = make_host(parts, lambda k: None)
    models = Counter(assign(described.models, described.clients))
    sizes = {model: _sizes(host.client(k)) for model, k in parts.cards.architectures().items()}
    rows = tuple(Parameters(model, models[model], *sizes[model]) for model in sizes)
    return Facts(_distinct(parts.task.names), rows)


def _sizes(client: Client) -> tuple[int, int]:
    everything = [*client.model.parameters(), *client.state.parameters()]
    return sum({id(p): p.numel() for p in everything}.values()), client.trained_size()


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names that tell classes apart even where a data set gives two of them one name."""
    twice = Counter(names)
    return tuple(name if twice[name] == 1 else f"{name} ({number})" for number, name in enumerate(names))

"""Reads run folders into plain numbers for a report.

A run may be running or stopped: nothing here takes its lock or writes to it. Missing or damaged data is left out, and
`Run.problems` has a sentence that names the file.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pluribus.assembly import assemble
from pluribus.client import Client
from pluribus.data import Manifest
from pluribus.errors import DamagedFileError, DataError, FileAccessError, MissingSettingError, PluribusError
from pluribus.evaluate import Chosen, Metrics, choose, headline_in, over_clients, selection_text
from pluribus.experiment import SITES, Experiment, flags, from_toml
from pluribus.host import make_host
from pluribus.internal.clock import time_left
from pluribus.internal.metrics import ACCURACY, METRICS, Metric, headline_of
from pluribus.internal.system import is_locked
from pluribus.internal.views import AFTER, choose_view
from pluribus.report.groups import name_runs
from pluribus.report.sites import Site, read_sites
from pluribus.storage.code import Allow, check_code, find_code
from pluribus.storage.files import read_json, to_json

DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)  # of reading a damaged file

LARGEST = 1e100  # no metric and no time is larger, and squares of this are finite

T = TypeVar("T")
Held = tuple[list[list[int]], str]  # rows per client and class, and the digest of the partition
Traffic = dict[tuple[str, str], Counter[int]]  # (direction, tensor) -> round -> bytes


class Parameters(NamedTuple):
    """Parameters of the clients of an architecture: all in model and state, and those that the method trains."""

    model: str
    clients: int
    total: int
    trainable: int


class Facts(NamedTuple):
    """Facts that are not in a run folder and come from its experiment."""

    classes: tuple[str, ...] = ()
    parameters: tuple[Parameters, ...] = ()
    metric: str = ACCURACY  # the headline


Known = dict[str, Facts | str]  # by experiment, for all seeds; a string says why there are none


@dataclass(frozen=True)
class Run:
    """A run, finished or not."""

    path: Path
    experiment: Experiment
    state: str  # `finished`, `running` or `stopped`
    rounds: int  # of the whole run
    history: list[dict[str, Any]]
    view: str  # the view of the numbers; the method's own unless `see` chooses another
    chosen: Mapping[int, Chosen]  # in that view
    by_view: Mapping[str, Mapping[int, Chosen]]  # in every view, the method's own first
    traffic: Traffic
    counts: list[list[int]]  # rows per client and class; empty: unknown, as in a federation of real sites
    partition: str  # digest of the partition; equal if clients hold the same rows
    models: tuple[str, ...]  # models by client
    classes: tuple[str, ...]
    parameters: tuple[Parameters, ...]
    metric: Metric  # the headline metric
    config: str
    commands: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    confusion: list[list[int]] = field(default_factory=list)  # test rows by true and predicted class; empty: not asked
    sites: tuple[Site, ...] = ()  # of a federation of real sites
    name: str = ""  # name of the run in a report, different from those of the other runs

    @property
    def views(self) -> tuple[str, ...]:
        """The views of the method, its own first."""
        return tuple(self.by_view)

    def see(self, view: str) -> Run:
        """The same run in another view, or in the method's own if it lacks that one."""
        found = choose_view(self.views, view)
        return replace(self, view=found, chosen=self.by_view[found])

    @property
    def score(self) -> Metrics:
        """The test metric over clients, selected on validation: `mean`, `worst`, `best` and so on."""
        values = {k: one.selected.get("test") for k, one in self.chosen.items()}
        return over_clients(values, Counter(), self.metric.smaller)

    @property
    def left(self) -> str | None:
        """Time left while it is running, if the other rounds take as long as those that are done."""
        return _time_left(self.state, self.history, self.rounds)

    @property
    def epsilon(self) -> float | None:
        """The most that a client spent of its privacy budget. None: the run has no differential privacy."""
        return max((spent for record in self.history for spent in record["epsilon"].values()), default=None)

    def cumulate(self, of: Callable[[dict[str, Any]], float]) -> list[float]:
        return list(accumulate(map(of, self.history), initial=0.0))[1:]

    def client(self, k: int) -> str:
        """Label of a client in a plot: its number and model."""
        return f"{k} {self.models[k]}" if k < len(self.models) else str(k)

    def class_name(self, number: int) -> str:
        """Name of a class, or its number if the data set is not available."""
        return self.classes[number] if number < len(self.classes) else str(number)


class Brief(NamedTuple):
    """What a list of runs shows of one."""

    path: Path
    method: str
    seed: int
    state: str
    done: int  # rounds
    rounds: int
    metric: Metric
    score: float | None  # mean over clients, selected on validation
    left: str | None


def read_brief(path: Path, allow: Allow = False) -> Brief:
    """Read the progress of a run from few of its files."""
    described, history = Experiment(**from_toml(path / "config.toml") | {"out": str(path)}), list[dict[str, Any]]()
    folder, state, rounds = _Folder(path), _state(path), _planned_rounds(described, path, allow)
    folder.lines("metrics.jsonl", lambda line: history.append(_record(line)))
    view = next((view for record in history for view in record["mean"]), "after")
    metric, chosen = headline_in(history), choose(history, view)
    score = over_clients({k: one.selected.get("test") for k, one in chosen.items()}, Counter(), metric.smaller)["mean"]
    left = _time_left(state, history, rounds)
    return Brief(path, described.method, described.seed, state, len(history), rounds, metric, score, left)


def _state(path: Path) -> str:
    return "finished" if (path / "result.json").exists() else "running" if in_use(path) else "stopped"


def _planned_rounds(described: Experiment, path: Path, allow: Allow) -> int:
    try:
        check_code(path / "config.toml", vars(described), allow)
        return described.all_rounds()
    except PluribusError:  # a method of the user that cannot or must not be imported here; it may add rounds of warm-up
        return described.rounds


def _time_left(state: str, history: list[dict[str, Any]], rounds: int) -> str | None:
    if state != "running" or not 0 < len(history) < rounds:
        return None
    return time_left(sum(record["seconds"] for record in history) / len(history), rounds - len(history))


def selection_of(runs: Iterable[Run]) -> str:
    """Say in words how the rounds of the results were selected."""
    return selection_text(one.selected.get("val") for run in runs for one in run.chosen.values())


def metrics_text(runs: Iterable[Run]) -> str:
    """The headline metric of some runs in words; several if they differ."""
    return " or ".join(dict.fromkeys(run.metric.text for run in runs))


def read_runs(paths: Iterable[str | Path], allow: Allow = False, known: Known | None = None) -> list[Run]:
    """Read the runs in some folders and below them, and give each a distinct name."""
    known = {} if known is None else known
    folders = dict.fromkeys(folder for path in paths for folder in run_folders(Path(path)))
    if not folders:
        raise MissingSettingError("give at least one run folder, or a folder that contains run folders.")
    return name_runs([_read(folder, allow, known) for folder in folders])


def run_folders(path: Path) -> list[Path]:
    """The folder itself if it is a run folder, otherwise all run folders below it, at least one."""
    found = find_runs(path)
    if not found:
        raise FileAccessError(f"{path} contains no run: neither it nor a folder below it has a config.toml.")
    return found


def find_runs(path: Path) -> list[Path]:
    """The folder itself if it is a run folder, otherwise all run folders below it. There may be none yet."""
    try:
        if not path.is_dir():
            raise FileAccessError(f"there is no folder {path}. Give a run folder.")
        if is_run(path):
            return [path]
        return [file.parent for file in sorted(path.glob("**/config.toml"))]
    except OSError as error:  # the system refuses, or a folder of it vanishes meanwhile
        raise FileAccessError(f"cannot search {path} for runs: {error.strerror}. Give a run folder.") from error


def is_run(path: Path) -> bool:
    """Whether this is a run folder."""
    return (path / "config.toml").exists()


@dataclass
class _Folder:
    """A folder that is read, and the problems found in it."""

    path: Path
    problems: list[str] = field(default_factory=list)

    def lines(self, name: str, take: Callable[[Any], None]) -> None:
        """Read the lines of a JSON file up to the first damaged one. Ignore a last line without its newline."""
        path = self.path / name
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return  # no round yet
        except OSError as error:
            self.problems.append(f"cannot read {path}: {error.strerror}.")
            return
        for number, line in enumerate(text.split("\n")[:-1], 1):
            try:
                take(json.loads(line))
            except DAMAGE:
                self.problems.append(f"{path} is damaged in line {number}: this line and all after it are left out.")
                return

    def read(self, name: str, read: Callable[[], T], otherwise: T) -> T:
        """Read a file. If that fails, record the problem and return `otherwise`."""
        try:
            return read()
        except PluribusError as error:
            self.problems.append(error.sentence)
        except OSError as error:
            self.problems.append(f"cannot read {self.path / name}: {error.strerror}.")
        except DAMAGE as error:
            self.problems.append(f"{self.path / name} is damaged: {error}.")
        return otherwise


def _read(path: Path, allow: Allow, known: Known) -> Run:
    described = Experiment(**from_toml(path / "config.toml") | {"out": str(path)})
    folder, state, history = _Folder(path), _state(path), list[dict[str, Any]]()
    finished = state == "finished"
    folder.lines("metrics.jsonl", lambda line: history.append(_record(line)))
    if finished and not history:
        folder.problems.append(f"{path / 'metrics.jsonl'} contains no round.")
    views = list(dict.fromkeys(view for record in history for view in record["mean"])) or [AFTER]
    traffic: Traffic = {}
    ledger = _Ledger(traffic)
    folder.lines("traffic.jsonl", ledger.take)
    unknown: Held = [], str(path)
    counts, digest = folder.read("partition.json", lambda: _partition(path / "partition.json"), unknown)
    facts = _facts(described, folder, allow, known)
    by_view = {view: _choose(folder, history, view) for view in views}
    chosen = by_view[views[0]]
    return Run(
        path=path,
        experiment=described,
        state=state,
        rounds=_planned_rounds(described, path, allow),
        history=history,
        view=views[0],
        chosen=chosen,
        by_view=by_view,
        traffic=traffic,
        counts=counts,
        partition=digest,
        models=folder.read("config.toml", lambda: described.client_models(), ()),
        classes=facts.classes,
        parameters=facts.parameters,
        metric=headline_in(history) if history else METRICS[facts.metric],
        config=(path / "config.toml").read_text(encoding="utf-8"),
        commands=_commands(path, described, allow, bool(counts), finished),
        warnings=folder.read("result.json", lambda: _warnings(path / "result.json"), ()) if finished else (),
        confusion=folder.read("result.json", lambda: _confusion(path / "result.json"), []) if finished else [],
        sites=folder.read("link", lambda: read_sites(path, history, chosen, ledger.sent), ()),
        problems=tuple(folder.problems),
    )


def _choose(folder: _Folder, history: Sequence[dict[str, Any]], view: str) -> dict[int, Chosen]:
    nothing: dict[int, Chosen] = {}
    return folder.read("metrics.jsonl", lambda: choose(history, view), nothing)


def _record(line: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a line to the record of a round. Every value gets its type, or raises."""
    return {
        "round": int(line["round"]),
        "metric": headline_of(line).name,
        **({"attackers": [int(k) for k in line["attackers"]]} if "attackers" in line else {}),
        "seconds": _finite(line["seconds"]),
        "bytes": {way: int(line["bytes"][way]) for way in ("up", "down")},
        "loss": _number(line["loss"]),
        "mean": {view: _figures(rows) for view, rows in line["mean"].items()},
        "clients": {str(int(k)): _figures(views) for k, views in line["clients"].items()},
        "notes": dict(line.get("notes") or {}),
        "spans": {str(name): _finite(seconds) for name, seconds in line.get("spans", {}).items()},
        "epsilon": {str(int(k)): float(spent) for k, spent in line.get("privacy", {}).get("epsilon", {}).items()},
    }


def _figures(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Metrics]:
    return {name: {metric: _number(value) for metric, value in row.items()} for name, row in rows.items()}


def _number(value: Any) -> float | None:
    return None if value is None else _finite(value)


def _finite(value: Any) -> float:
    """A number that has a deviation from others."""
    found = float(value)
    if not abs(found) < LARGEST:
        raise ValueError("it is not finite")
    return found


@dataclass
class _Ledger:
    """Adds up bytes, line by line."""

    sums: Traffic
    layouts: list[dict[str, int]] = field(default_factory=list)
    sent: Counter[tuple[int, str]] = field(default_factory=Counter)  # (client, direction) -> bytes

    def take(self, line: Mapping[str, Any]) -> None:
        """Read a layout, or a transfer that refers to one."""
        if "tensors" in line:
            self.layouts.append({name: int(size) for name, size in line["tensors"].items()})
            return
        t, way, layout = int(line["round"]), str(line["direction"]), self.layouts[line["layout"]]
        self.sent[int(line["client"]), way] += sum(layout.values())
        for tensor, size in layout.items():
            self.sums.setdefault((way, tensor), Counter())[t] += size


def _partition(path: Path) -> Held:
    if not path.exists():
        return [], str(path)  # a federation of real sites has none
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"))
    except DataError as error:
        raise DamagedFileError(f"{path} is damaged: {error.sentence}") from error
    return [[int(count) for count in row] for row in manifest.counts], str(manifest.digest)


def _warnings(path: Path) -> tuple[str, ...]:
    return tuple(str(sentence) for sentence in read_json(path)["warnings"])


def _confusion(path: Path) -> list[list[int]]:
    return [[int(count) for count in row] for row in read_json(path).get("confusion", {}).get("counts", [])]


def in_use(path: Path) -> bool:
    """Whether a process holds the run's lock."""
    try:
        with (path / ".lock").open() as lock:
            return is_locked(lock)
    except OSError:
        return False


def _commands(path: Path, described: Experiment, allow: Allow, simulated: bool, finished: bool) -> tuple[str, ...]:
    if not simulated:
        return (f"pluribus serve {shlex.quote(described.method)} --config federation.toml",)
    words = [] if finished else [["pluribus", "resume", str(path), *_permission(described)]]
    words.append(["pluribus", "run", "--config", str(path / "config.toml")])
    with contextlib.suppress(PluribusError):  # a method of the user that cannot or must not be imported here
        check_code(path / "config.toml", vars(described), allow)
        words.append(["pluribus", "run", described.method, *flags(described)])
    return tuple(shlex.join(command) for command in words)


def _permission(described: Experiment) -> list[str]:
    return ["--allow-code"] if any(find_code(vars(described))) else []


def _facts(described: Experiment, folder: _Folder, allow: Allow, known: Known) -> Facts:
    """Find the facts of an experiment, once for all seeds: a model has the same size for each."""
    if described.data == SITES:
        return Facts()  # only the sites have the data and the models
    key = to_json({name: str(value) for name, value in vars(described).items() if name not in ("seed", "out")})
    if key not in known:
        try:
            check_code(folder.path / "config.toml", vars(described), allow)
            known[key] = _find_facts(described)
        except PluribusError as error:
            missing = "class names and numbers of parameters are missing"
            known[key] = f"{missing} because the experiment cannot be assembled: {error.sentence}"
    found = known[key]
    if isinstance(found, Facts):
        return found
    folder.problems.append(found)
    return Facts()


def _find_facts(described: Experiment) -> Facts:
    parts = assemble(replace(described, device="cpu", workers=1))
    host = make_host(parts, lambda k: None)
    models = Counter(described.client_models())
    sizes = {model: _sizes(host.client(k)) for model, k in parts.cards.architectures().items()}
    names = parts.task.names if parts.task.target.kind == "classes" else ("all",)
    counts = Counter(names)  # two classes may have the same name
    classes = tuple(name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(names))
    parameters = tuple(Parameters(model, models[model], *sizes[model]) for model in sizes)
    return Facts(classes, parameters, parts.task.metrics[0])


def _sizes(client: Client) -> tuple[int, int]:
    everything = [*client.model.parameters(), *client.state.parameters()]
    return sum({id(p): p.numel() for p in everything}.values()), client.trained_size()

"""Summaries of finished runs, which remain when run folders are deleted: settings, results, bytes, time and device.

A run is identified by the settings that decide its results. Machines do not change results, so one file may hold runs
of several machines, and tables may share runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pluribus.errors import DamagedFileError, FileAccessError
from pluribus.evaluate import Chosen, choose
from pluribus.experiment import SETTINGS, Experiment, experiment
from pluribus.internal.metrics import ACCURACY
from pluribus.storage.checks import Check, first_wrong, is_client, is_count, is_list, is_number, is_table, is_text
from pluribus.storage.files import read_json, to_json, write_text
from pluribus.storage.history import is_figures, is_summary
from pluribus.study.standings import Run

Key = tuple[str, int]
KEPT = ("summary", "clients", "bytes", "seconds", "warnings", "torch")
DIGITS = 6


def _is_client(row: Any) -> bool:
    """Whether these are the results of a client. Those in other views may be missing."""
    selected: dict[str, Check] = {"selected": is_figures}
    is_views = is_table(is_text, lambda one: first_wrong(one, selected) is None)
    return first_wrong(row, selected) is None and is_views(row.get("views", {}))


CHECKS: dict[str, Check] = {
    "seed": lambda seed: type(seed) is int,
    "summary": is_summary,
    "clients": is_table(is_client, _is_client),
    "reached": is_table(is_text, lambda value: value is None or is_list(is_count)(value)),
    "seconds": is_number,
    "bytes": is_table(is_text, is_count),
}


@dataclass(frozen=True)
class Finished:
    """A finished run."""

    settings: Mapping[str, Any]  # the settings that decide its results
    run: Run
    reached: Mapping[str, Sequence[int] | None]
    """Rounds and bytes until the mean test accuracy reached a target, by target."""
    device: str
    pluribus: str

    @property
    def key(self) -> Key:
        return _to_key(self.settings), self.run.seed

    @property
    def rounds(self) -> int:
        return int(self.settings["rounds"])

    @property
    def all_rounds(self) -> int:
        """Rounds with the warm-up rounds."""
        return experiment(**self.settings).all_rounds()

    def has(self, targets: Iterable[str], view: str) -> bool:
        """Whether the summary holds these targets, and the accuracy of each client in a view."""
        return self.reached.keys() >= set(targets) and replace(self.run, wanted=view).by_client is not None

    def to_json(self) -> dict[str, Any]:
        """Plain values without the settings, which other seeds share."""
        values = {"seed": self.run.seed, **{name: self.run.result[name] for name in KEPT}}
        values |= {} if self.run.metric.name == ACCURACY else {"metric": self.run.metric.name}
        values |= {"steps": self.run.result["steps"]} if self.run.result.get("steps") else {}
        values |= {"reached": dict(self.reached), "device": self.device, "pluribus": self.pluribus}
        return {name: _round(value) for name, value in values.items()}


def decisive(described: Experiment) -> dict[str, Any]:
    """The settings that decide a run's results, without the seed."""
    others, told = ("seed", *SETTINGS["execution"]), described.settings()
    return {name: value for name, value in told.items() if name not in others and value is not None}


def key(described: Experiment) -> Key:
    """Identifies the run of an experiment."""
    return _to_key(decisive(described)), described.seed


def _to_key(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def label(described: Experiment) -> str:
    """Folder name for the run of an experiment. Equal keys have equal names."""
    digest = hashlib.sha256(key(described)[0].encode()).hexdigest()
    return f"{described.method}-{digest[:8]}-{described.seed}"


def collect(described: Experiment, targets: Iterable[str], device: str) -> Finished:
    """Summarize the run in an experiment's folder."""
    from pluribus import __version__

    run = Run.read(described)
    result = {name: run.result[name] for name in KEPT} | {"steps": run.result.get("steps"), "metric": run.metric.name}
    others = {view: choose(run.history, view) for view in run.result["summary"] if view != run.headline}
    each = run.result["clients"].items()
    result["clients"] = {k: _client(one, {view: of[int(k)] for view, of in others.items()}) for k, one in each}
    reached = {target: run.reached(float(target)) for target in targets}
    return Finished(decisive(described), replace(run, result=result, history=[]), reached, device, __version__)


def _client(client: Mapping[str, Any], others: Mapping[str, Chosen]) -> dict[str, Any]:
    """A client's selected metrics in all views. Those of the headline's view come first."""
    kept = {name: client[name] for name in ("model", "selected", "selected_round")}
    views = {view: {"selected": one.selected, "selected_round": one.selected_round} for view, one in others.items()}
    return kept | ({"views": views} if views else {})


def write(path: Path, name: str, found: Iterable[Finished]) -> None:
    """Write a file with one line per run. Runs with the same settings form a group."""
    shared: dict[str, list[Finished]] = {}
    for one in found:
        shared.setdefault(_to_key(one.settings), []).append(one)
    groups = []
    for settings, runs in shared.items():
        lines = ",\n  ".join(to_json(one.to_json()) for one in sorted(runs, key=lambda one: one.run.seed))
        groups.append(f'{{"settings": {settings},\n "runs": [\n  {lines}]}}')
    write_text(path, f'{{"table": {json.dumps(name)}, "groups": [\n' + ",\n".join(groups) + "]}\n")


def read(path: Path) -> dict[Key, Finished]:
    """Read the runs of a file, or of all summaries in a folder. A run that is in several files is read once."""
    if not path.exists():
        raise FileAccessError(f"cannot read {path}: there is no such file or folder.")
    contents = {file: read_json(file) for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])}
    summaries = {file: one for file, one in contents.items() if isinstance(one, dict) and "groups" in one}
    if not path.is_dir() and not summaries:
        raise DamagedFileError(f"{path} is not a summary of runs. pluribus reproduce writes one.")
    found: dict[Key, Finished] = {}
    for one in (one for file, written in summaries.items() for one in _runs(file, written)):
        known = found.get(one.key, one)  # files of different tables may hold different targets
        found[one.key] = replace(one, reached={**known.reached, **one.reached})
    return found


def _runs(path: Path, written: Mapping[str, Any]) -> Iterable[Finished]:
    try:
        for group in written["groups"]:
            described = experiment(**group["settings"])
            settings = decisive(described)  # adds the settings that are new since the file was written
            for entry in group["runs"]:
                if wrong := first_wrong(entry, CHECKS):
                    raise DamagedFileError(f"{path} is damaged: {wrong}. Restore it, or run the table again.")
                result = {name: entry[name] for name in KEPT} | {"steps": entry.get("steps")}
                result["metric"] = entry.get("metric", ACCURACY)
                run = Run(described.method, entry["seed"], path, result, [])
                yield Finished(settings, run, entry["reached"], entry["device"], entry["pluribus"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{path} is damaged: a run lacks {error}.") from error


def _round(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _round(item) for key, item in value.items()}
    return round(value, DIGITS) if isinstance(value, float) else value

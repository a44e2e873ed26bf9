"""What stays of finished runs when their folders are gone: settings, figures, bytes, seconds and where they ran.

Runs are known by what decides their figures. Machines do not, so runs of several machines may lie in one file, and runs
that several tables share need not be run twice.
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
from pluribus.storage.files import read_json, to_json, write_text
from pluribus.study.standings import Run

Key = tuple[str, int]
KEPT = ("summary", "clients", "bytes", "seconds", "warnings", "torch")
DIGITS = 6


@dataclass(frozen=True)
class Finished:
    """A run that came to its end."""

    settings: Mapping[str, Any]
    """Those that decide its figures."""
    run: Run
    reached: Mapping[str, Sequence[int] | None]
    """Rounds and bytes until the mean test accuracy was first there, by accuracy."""
    device: str
    pluribus: str

    @property
    def key(self) -> Key:
        """What it is known by."""
        return _spelled(self.settings), self.run.seed

    @property
    def rounds(self) -> int:
        """How long it was."""
        return int(self.settings["rounds"])

    @property
    def all_rounds(self) -> int:
        """With the rounds of warm-up before."""
        return experiment(**self.settings).all_rounds()

    def has(self, targets: Iterable[str], view: str) -> bool:
        """Whether what was kept says when these accuracies were reached, and how each client fared in a view."""
        return self.reached.keys() >= set(targets) and replace(self.run, wanted=view).by_client is not None

    def to_json(self) -> dict[str, Any]:
        """Without its settings, which other seeds share."""
        told = {"seed": self.run.seed, **{name: self.run.result[name] for name in KEPT}}
        told |= {"steps": self.run.result["steps"]} if self.run.result.get("steps") else {}
        told |= {"reached": dict(self.reached), "device": self.device, "pluribus": self.pluribus}
        return {name: _rounded(value) for name, value in told.items()}


def decisive(described: Experiment) -> dict[str, Any]:
    """The settings that decide a run's figures, but for its seed."""
    others = ("seed", *SETTINGS["execution"])
    told = {name: value for name, value in described.settings().items() if name not in others}
    return {name: value for name, value in told.items() if value is not None}


def key(described: Experiment) -> Key:
    """What the run of an experiment is known by."""
    return _spelled(decisive(described)), described.seed


def _spelled(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def label(described: Experiment) -> str:
    """A name for the run of an experiment: equal for equal keys."""
    digest = hashlib.sha256(key(described)[0].encode()).hexdigest()
    return f"{described.method}-{digest[:8]}-{described.seed}"


def collected(described: Experiment, targets: Iterable[str], device: str) -> Finished:
    """What stays of the run in an experiment's folder."""
    from pluribus import __version__

    run = Run.read(described)
    result = {name: run.result[name] for name in KEPT} | {"steps": run.result.get("steps")}
    others = {view: choose(run.history, view) for view in run.result["summary"] if view != run.headline}
    result["clients"] = {
        k: _client(client, {view: of[int(k)] for view, of in others.items()})
        for k, client in run.result["clients"].items()
    }
    reached = {target: run.reached(float(target)) for target in targets}
    kept = Run(run.method, run.seed, run.folder, result, [])
    return Finished(decisive(described), kept, reached, device, __version__)


def _client(client: Mapping[str, Any], others: Mapping[str, Chosen]) -> dict[str, Any]:
    """A client's selected figures, in the headline's view and in the others that there are."""
    kept = {name: client[name] for name in ("model", "selected", "selected_round")}
    views = {view: {"selected": one.selected, "selected_round": one.selected_round} for view, one in others.items()}
    return kept | ({"views": views} if views else {})


def write(path: Path, name: str, found: Iterable[Finished]) -> None:
    """A file with a line per run, below the settings that runs share."""
    shared: dict[str, list[Finished]] = {}
    for one in found:
        shared.setdefault(_spelled(one.settings), []).append(one)
    groups = []
    for settings, runs in shared.items():
        lines = ",\n  ".join(to_json(one.to_json()) for one in sorted(runs, key=lambda one: one.run.seed))
        groups.append(f'{{"settings": {settings},\n "runs": [\n  {lines}]}}')
    write_text(path, f'{{"table": {json.dumps(name)}, "groups": [\n' + ",\n".join(groups) + "]}\n")


def read(place: Path) -> dict[Key, Finished]:
    """The runs of a file, or of all summaries in a folder. One that several files have counts once."""
    if not place.exists():
        raise FileAccessError(f"cannot read {place}: there is no such file or folder.")
    if place.is_dir():
        told = [(path, read_json(path)) for path in sorted(place.glob("*.json"))]
        files = [(path, written) for path, written in told if _is_summary(written)]
    else:
        files = [(place, read_json(place))]
        if not _is_summary(files[0][1]):
            raise DamagedFileError(f"{place} is no summary of runs: pluribus reproduce writes one.")
    found: dict[Key, Finished] = {}
    for one in (one for path, written in files for one in _runs(path, written)):
        there = found.get(one.key, one)  # one table may have asked for accuracies that another did not
        found[one.key] = replace(one, reached={**there.reached, **one.reached})
    return found


def _is_summary(written: Any) -> bool:
    return isinstance(written, dict) and "groups" in written


def _runs(path: Path, written: Mapping[str, Any]) -> Iterable[Finished]:
    try:
        for group in written["groups"]:
            described = experiment(**group["settings"])
            for told in group["runs"]:
                result = {name: told[name] for name in KEPT} | {"steps": told.get("steps")}
                run = Run(described.method, told["seed"], path, result, [])
                # what settings there are may have grown since
                yield Finished(decisive(described), run, told["reached"], told["device"], told["pluribus"])
    except (KeyError, TypeError) as error:
        raise DamagedFileError(f"{path} is damaged: what it says of a run lacks {error}.") from error


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, DIGITS) if isinstance(value, float) else value

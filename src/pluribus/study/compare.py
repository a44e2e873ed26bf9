"""Methods side by side: the same data, partition, models and initial weights for all of them, over several seeds.

OUT/METHOD-SEED/    an ordinary run folder each
OUT/compare.json    the figures, once all runs are finished
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from pluribus.assembly import Assembly, assemble
from pluribus.data.datasets import loaded_once
from pluribus.errors import (
    ConflictError,
    FileAccessError,
    FormatError,
    MissingSettingError,
    OtherRunError,
    RangeError,
    UnfinishedError,
    UnknownNameError,
    unknown,
)
from pluribus.experiment import TRAINING, Experiment, embedded_hyper, experiment, from_toml, known_settings
from pluribus.host import make_host
from pluribus.internal.views import AFTER, View, check_view
from pluribus.method import Method, find, name_of
from pluribus.models import assign
from pluribus.processes import check_guarded
from pluribus.settings import flag_name
from pluribus.storage.files import read_json, write_json
from pluribus.storage.folder import RunFolder, free
from pluribus.storage.toml import read_toml, to_toml
from pluribus.study.board import Board
from pluribus.study.budget import equal_rounds
from pluribus.study.parallel import run_all
from pluribus.study.standings import Comparison, Run, overruled

AnyMethod = str | Method | type[Method]


@loaded_once()
def compare(
    methods: Sequence[AnyMethod],
    *,
    seeds: int = 3,
    seed: int = 0,
    baseline: str | None = None,
    target: float | None = None,
    view: View = AFTER,
    equal_steps: bool = False,
    jobs: int | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Run methods on the same clients, and say which differences are more than noise.

    Settings are those of `pluribus.run` and hold for all methods, whatever their own defaults; `own` gives one method
    its hyper-parameters and training settings, such as `{"fedgh": {"server_lr": 0.02}}`. Seeds are `seed`, `seed` + 1
    and so on. A folder `out` that holds runs of this comparison is gone on with: what is finished is read, what was
    stopped is resumed.

    `view` is the model that is asked: `after` local training or `before` it, where a method has that view, or each
    method's `own`. Only rows of equal views are tested against each other. `equal_steps` gives every method as many
    rounds as it takes for the gradient steps per client that the one with the most takes in `rounds`.

    Every run has one CPU thread unless `threads` says otherwise, so that figures do not depend on `jobs`, the number
    of runs at a time: on a GPU one, otherwise one per core.
    """
    check_guarded()
    names = [name_of_any(method) for method in methods]
    described = described_by(methods, config, own or {}, settings | {"seed": seed})
    _check(names, seeds, jobs, baseline, target)
    check_view(view)
    strange = overruled_by(described, config, own or {}, settings)
    folder = _folder(out, next(iter(described.values())))
    parameters = _parameters(described, seeds)
    if equal_steps:
        rounds = equal_rounds(described)
        described = {name: replace(one, rounds=rounds[name]) for name, one in described.items()}
    grid = [
        replace(described[name], seed=number, out=str(folder / f"{name}-{number}"))
        for number in range(seed, seed + seeds)
        for name in names
    ]
    for one in grid:
        check_settings(one)

    def found(whole: Sequence[str]) -> Comparison:
        runs = {name: tuple(Run.read(one, view) for one in grid if one.method == name) for name in whole}
        _check_partitions(runs)
        first = statistics.fmean(run.accuracies["mean"] for run in runs[whole[0]])
        left_out = tuple(name for name in names if name not in whole)
        goal = first if target is None else target
        asked = view, equal_steps, {name: own for name, own in strange.items() if name in whole}, left_out
        experiments = {name: described[name] for name in whole}
        return Comparison(experiments, runs, baseline or names[0], goal, parameters, folder, *asked)

    try:
        finish(grid, folder, jobs or default_jobs(grid[0]), progress)
    except UnfinishedError as error:
        whole = [name for name in names if all(_finished(one) for one in grid if one.method == name)]
        if (baseline or names[0]) in whole and len(whole) > 1:
            error.partial = found(whole)
        raise
    all_of_it = found(names)
    write_json(folder / "compare.json", all_of_it.to_json())
    return all_of_it


def name_of_any(method: AnyMethod) -> str:
    """The name of a method that is given by name, class or instance."""
    if isinstance(method, str):
        return method
    return name_of(method if isinstance(method, type) else type(method))


def _check(names: Sequence[str], seeds: int, jobs: int | None, baseline: str | None, target: float | None) -> None:
    for given, value in (("seeds", seeds), ("jobs", jobs)):
        if value is not None and value < 1:
            raise RangeError(f"{flag_name(given)} must be at least 1, not {value}.")
    if baseline is not None and baseline not in names:
        raise UnknownNameError(f"--baseline must be one of {', '.join(names)}, not {baseline}.")
    if target is not None and not 0 <= target <= 1:
        raise RangeError(f"--target must be an accuracy in [0, 1], not {target}.")


def common_settings(config: str | Path | None) -> dict[str, Any]:
    """What holds for all methods where no flag says otherwise."""
    own = ("method", "hyper", "out", "seed")  # of each run
    common = {one.name: one.default for one in dataclasses.fields(Experiment) if one.name not in (*TRAINING, *own)}
    written = from_toml(Path(config)) if config is not None else {}
    return common | {"threads": 1} | {name: value for name, value in written.items() if name not in own}


def described_by(
    methods: Sequence[AnyMethod],
    config: str | Path | None,
    own: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> dict[str, Experiment]:
    """The experiment of each method: what is common to all, and what is its own."""
    names = [name_of_any(method) for method in methods]
    if not names:
        raise MissingSettingError("which methods? pluribus list methods shows all.")
    for name in names:
        find(name)
        if names.count(name) > 1:
            raise FormatError(f"{name} is named twice.")
    for name in own:
        if name not in names:
            raise unknown("method of this comparison", name, names, "pluribus compare --help")
    common, written = {**common_settings(config), **settings}, _written_hyper(config)
    if common["test"] == "own" and not common["test_fraction"]:
        raise RangeError("a comparison needs test data: --test-fraction must be above 0.")
    if callable(common["models"]):
        common["models"] = list(assign(common["models"], common["clients"]))  # processes cannot be sent a function
    described, usual = {}, {name: getattr(Experiment, name) for name in TRAINING}
    given = {*settings, *(from_toml(Path(config)) if config is not None else {})}
    for method, name in zip(methods, names, strict=True):
        embedded = {} if isinstance(method, Method) else embedded_hyper(find(name), given)
        alone = {**embedded, **written.get(name, {}), **own.get(name, {})}
        for setting in alone:
            if setting in known_settings() and setting not in TRAINING:
                raise ConflictError(f"{setting} is the same for all methods: use {flag_name(setting)}.")
        described[name] = experiment(method, **usual | common | alone)  # no method's own defaults
        described[name].build_method()  # what is wrong with its hyper-parameters shows here
    return described


def overruled_by(
    described: Mapping[str, Experiment],
    config: str | Path | None,
    own: Mapping[str, Mapping[str, Any]],
    settings: Iterable[str],
) -> dict[str, dict[str, Any]]:
    """By method, its own defaults of training that do not hold here, though nobody asked for other values."""
    given = {*settings, *(from_toml(Path(config)) if config is not None else {})}
    written = _written_hyper(config)
    found = {
        name: overruled(one, given | {*written.get(name, {}), *own.get(name, {})}) for name, one in described.items()
    }
    return {name: settings for name, settings in found.items() if settings}


def _written_hyper(config: str | Path | None) -> dict[str, dict[str, Any]]:
    """By method: [hyper.fedgh] of a comparison's file, or [hyper] of a run's file, which names its method."""
    written = from_toml(Path(config)) if config is not None else {}
    hyper = written.get("hyper", {})
    if "method" in written:
        return {written["method"]: hyper}
    for name, table in hyper.items():
        if not isinstance(table, dict):
            raise FormatError(f"[hyper] in {config} is of no method: write [hyper.METHOD] above {name}.")
        find(name)
    return dict(hyper)


def _folder(out: str | Path | None, described: Experiment) -> Path:
    if out is not None:
        RunFolder.check_free(str(out))
        path = Path(out)
    else:
        data = Path(described.data).name.removesuffix(".npz").rpartition(".")[2]
        path = free(Path("runs") / f"{date.today().isoformat()}-compare-{data}")
    return path


def _parameters(described: Mapping[str, Experiment], seeds: int) -> dict[str, float]:
    """Trainable parameters by method. Puts everything together on the way, so that what is wrong shows at once."""
    found = {name: trainable_parameters(assemble(one)) for name, one in described.items()}
    for number in range(1, seeds):
        one = next(iter(described.values()))
        assemble(replace(one, seed=one.seed + number))
    return found


def trainable_parameters(parts: Assembly) -> float:
    """What the optimisers of a client move, the mean over clients."""
    host = make_host(parts, lambda k: None)
    sizes = {model: host.client(k).trained_size() for model, k in parts.cards.architectures().items()}
    return statistics.fmean(sizes[card.model] for card in parts.cards.values())


def default_jobs(described: Experiment) -> int:
    """Runs at a time: one where they share a GPU or a cluster, otherwise as many as there are cores for."""
    on_gpu = described.device.startswith("cuda") or (described.device == "auto" and torch.cuda.is_available())
    if on_gpu or described.engine == "ray":
        return 1
    return max(1, (os.cpu_count() or 1) // (described.workers * (described.threads or 1)))


def check_settings(described: Experiment) -> None:
    """A run that is there already must be one of these settings."""
    path = Path(described.out or "") / "config.toml"
    if not path.exists():
        return
    there, wanted = _leaves(read_toml(path)), _leaves(tomllib.loads(to_toml(described.settings())))
    for name in {**there, **wanted}:
        if there.get(name) != wanted.get(name):
            was, now = (_spelled(settings.get(name)) for settings in (there, wanted))
            raise OtherRunError(
                f"{described.out} was run with {flag_name(name)} {was}, not {now}. Choose another --out."
            )


def _leaves(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in settings.items() if k != "hyper"}, **settings.get("hyper", {})}


def _spelled(value: Any) -> str:
    return "unset" if value is None else str(value)


def finish(grid: Sequence[Experiment], folder: Path, jobs: int, progress: bool) -> None:
    """Run or resume, each in its folder, what is not finished yet. A run that fails leaves the others alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileAccessError(f"cannot write to {folder}: {error.strerror}. Choose another --out.") from error
    todo = [one for one in grid if not _finished(one)]
    try:
        with Board(grid, shown=progress) as board:
            failed = run_all(todo, min(jobs, len(todo)), board)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"Resume with the same command and --out {folder}") from stop
    if failed:
        kept = f"The other runs are kept: the same command with --out {folder} goes on."
        raise UnfinishedError(f"{_why(failed)} {kept}", failed)


def _finished(one: Experiment) -> bool:
    return (Path(one.out or "") / "result.json").exists()


def _why(failed: Mapping[str, str]) -> str:
    """Which runs failed, and for which reasons."""
    alike: dict[str, list[str]] = {}
    for run, reason in failed.items():
        alike.setdefault(reason, []).append(Path(run).name)
    return " ".join(
        f"{first} did not come to its end: {reason}" + (f" So did {', '.join(others)}." if others else "")
        for reason, (first, *others) in alike.items()
    )


def _check_partitions(runs: Mapping[str, Sequence[Run]]) -> None:
    """Same settings on other data would compare data."""
    first, *others = runs.values()
    for theirs in others:
        for one, other in zip(first, theirs, strict=True):
            if _digest(one) != _digest(other):
                raise OtherRunError(
                    f"{one.folder} and {other.folder} were run on other data: their partitions differ. "
                    f"Choose another --out."
                )


def _digest(run: Run) -> str:
    return str(read_json(run.folder / "partition.json")["digest"])

"""Compares methods on the same data, partition, models and initial weights, over several seeds.

OUT/METHOD-SEED/    one ordinary run folder per method and seed
OUT/compare.json    the results, written when all runs are finished
"""

from __future__ import annotations

import os
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any, Unpack

import torch

from pluribus import errors
from pluribus.assembly import Assembly, assemble
from pluribus.data.datasets import load_once
from pluribus.experiment import TRAINING, Experiment, embedded_hyper, experiment, from_toml, known_settings
from pluribus.host import make_host
from pluribus.internal.keywords import StudySettings
from pluribus.internal.views import AFTER, View, check_view
from pluribus.method import Method, find, name_of
from pluribus.processes import check_guarded
from pluribus.settings import flag_name
from pluribus.storage.files import read_json, write_json
from pluribus.storage.folder import RunFolder, free
from pluribus.storage.toml import read_toml, to_toml
from pluribus.study.board import Board
from pluribus.study.budget import equal_rounds
from pluribus.study.parallel import run_all
from pluribus.study.standings import Comparison, Run, find_overridden

AnyMethod = str | Method | type[Method]


@load_once()
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
    **settings: Unpack[StudySettings],
) -> Comparison:
    """Run methods on the same clients, and test which differences are more than noise.

    Settings are those of `pluribus.run`. They hold for all methods and replace the defaults of a method. `own` sets the
    hyper-parameters and training settings of one method, for example `{"fedgh": {"server_lr": 0.02}}`. The seeds are
    `seed`, `seed` + 1 and so on. If the folder `out` holds runs of this comparison, finished runs are read and stopped
    runs are resumed.

    `view` is the model that is evaluated: `after` local training, `before` it, or each method's `own`. A method that
    lacks the view is evaluated in its own. Only rows of equal views are tested against each other. `equal_steps` gives
    every method enough rounds for the number of gradient steps per client that the method with the most takes in
    `rounds`.

    Every run has one CPU thread unless `threads` is set, so that results do not depend on `jobs`, the number of
    parallel runs. The default is one on a GPU, otherwise one per core.
    """
    check_guarded()
    names = [name_of_any(method) for method in methods]
    described = describe_methods(methods, config, own or {}, settings | {"seed": seed})
    check_counts(seeds=seeds, jobs=jobs)
    if baseline is not None and baseline not in names:
        raise errors.UnknownNameError(f"--baseline must be one of {', '.join(names)}, not {baseline}.")
    if target is not None and not 0 <= target <= 1:
        raise errors.RangeError(f"--target must be an accuracy in [0, 1], not {target}.")
    check_view(view)
    overridden = find_overridden_defaults(described, config, own or {}, settings)
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

    def compare_finished(finished: Sequence[str]) -> Comparison:
        runs = {name: tuple(Run.read(one, view) for one in grid if one.method == name) for name in finished}
        _check_partitions(runs)
        first = statistics.fmean(run.accuracies["mean"] for run in runs[finished[0]])
        left_out = tuple(name for name in names if name not in finished)
        goal = first if target is None else target
        conditions = view, equal_steps, {name: own for name, own in overridden.items() if name in finished}, left_out
        experiments = {name: described[name] for name in finished}
        return Comparison(experiments, runs, baseline or names[0], goal, parameters, folder, *conditions)

    try:
        finish_runs(grid, folder, jobs or default_jobs(grid[0]), progress)
    except errors.UnfinishedError as error:
        finished = [name for name in names if all(_is_finished(one) for one in grid if one.method == name)]
        if (baseline or names[0]) in finished and len(finished) > 1:
            error.partial = compare_finished(finished)
        raise
    comparison = compare_finished(names)
    write_json(folder / "compare.json", comparison.to_json())
    return comparison


def name_of_any(method: AnyMethod) -> str:
    """Name of a method that is given by name, class or instance."""
    if isinstance(method, str):
        return method
    return name_of(method if isinstance(method, type) else type(method))


def check_counts(**counts: int | None) -> None:
    """Refuse a number of seeds, jobs and so on below 1. None: the default."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise errors.RangeError(f"{flag_name(name)} must be at least 1, not {value}.")


def common_settings(config: str | Path | None) -> dict[str, Any]:
    """Default settings of all methods, from the experiment and a config file."""
    own = ("method", "hyper", "out", "seed")  # of each run
    common = {one.name: one.default for one in fields(Experiment) if one.name not in (*TRAINING, *own)}
    return common | {"threads": 1} | {k: v for k, v in _read_config(config).items() if k not in own}


def _read_config(config: str | Path | None) -> dict[str, Any]:
    return from_toml(Path(config)) if config is not None else {}


def describe_methods(
    methods: Sequence[AnyMethod],
    config: str | Path | None,
    own: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> dict[str, Experiment]:
    """The experiment of each method, from the common settings and those of the method alone."""
    names = [name_of_any(method) for method in methods]
    if not names:
        raise errors.MissingSettingError("name at least one method. pluribus list methods shows all.")
    for name in names:
        find(name)
        if names.count(name) > 1:
            raise errors.FormatError(f"the method {name} is given twice. Give every method once.")
    for name in own:
        if name not in names:
            raise errors.unknown("method of this comparison", name, names, "pluribus compare --help")
    common, written = {**common_settings(config), **settings}, _read_hyper(config)
    if common["test"] == "own" and not common["test_fraction"]:
        raise errors.RangeError("a comparison needs test data: --test-fraction must be above 0.")
    described, usual = {}, {name: getattr(Experiment, name) for name in TRAINING}
    given = {*settings, *_read_config(config)}
    for method, name in zip(methods, names, strict=True):
        embedded = {} if isinstance(method, Method) else embedded_hyper(find(name), given)
        alone = {**embedded, **written.get(name, {}), **own.get(name, {})}
        for setting in alone:
            if setting in known_settings() and setting not in TRAINING:
                raise errors.ConflictError(f"{setting} is the same for all methods: use {flag_name(setting)}.")
        described[name] = experiment(method, **usual | common | alone)  # the defaults of the method do not apply
        described[name].build_method()  # checks its hyper-parameters
    return described


def find_overridden_defaults(
    described: Mapping[str, Experiment],
    config: str | Path | None,
    own: Mapping[str, Mapping[str, Any]],
    settings: Iterable[str],
) -> dict[str, dict[str, Any]]:
    """By method, its own training defaults that this comparison replaces although the user set no other value."""
    given, written, found = {*settings, *_read_config(config)}, _read_hyper(config), dict[str, dict[str, Any]]()
    for name, one in described.items():
        found[name] = find_overridden(one, given | {*written.get(name, {}), *own.get(name, {})})
    return {name: settings for name, settings in found.items() if settings}


def _read_hyper(config: str | Path | None) -> dict[str, dict[str, Any]]:
    """Hyper-parameters by method: [hyper.METHOD] of a comparison's file, or [hyper] of a run's file."""
    written = _read_config(config)
    hyper = written.get("hyper", {})
    if "method" in written:
        return {written["method"]: hyper}
    for name, table in hyper.items():
        if not isinstance(table, dict):
            raise errors.FormatError(f"[hyper] in {config} names no method: write [hyper.METHOD] above {name}.")
        find(name)
    return dict(hyper)


def _folder(out: str | Path | None, described: Experiment) -> Path:
    if out is not None:
        RunFolder.check_free(str(out))
        return Path(out)
    data = Path(described.data_name).name.removesuffix(".npz").rpartition(".")[2]
    return free(Path("runs") / f"{date.today().isoformat()}-compare-{data}")


def _parameters(described: Mapping[str, Experiment], seeds: int) -> dict[str, float]:
    """Trainable parameters by method. Assembles every run, so that mistakes show before the first one starts."""
    found = {name: trainable_parameters(assemble(one)) for name, one in described.items()}
    for number in range(1, seeds):
        one = next(iter(described.values()))
        assemble(replace(one, seed=one.seed + number))
    return found


def trainable_parameters(parts: Assembly) -> float:
    """Number of parameters that the optimizers of a client change, as the mean over clients."""
    host = make_host(parts, lambda k: None)
    sizes = {model: host.client(k).trained_size() for model, k in parts.cards.architectures().items()}
    return statistics.fmean(sizes[card.model] for card in parts.cards.values())


def default_jobs(described: Experiment) -> int:
    """Number of parallel runs: one on a GPU or a cluster, otherwise as many as the cores allow."""
    on_gpu = described.device.startswith("cuda") or (described.device == "auto" and torch.cuda.is_available())
    if on_gpu or described.engine == "ray":
        return 1
    return max(1, (os.cpu_count() or 1) // (described.workers * (described.threads or 1)))


def check_settings(described: Experiment) -> None:
    """Refuse an existing run that has other settings."""
    path = Path(described.out or "") / "config.toml"
    if not path.exists():
        return
    before, wanted = _flatten(read_toml(path)), _flatten(tomllib.loads(to_toml(described.settings())))
    for name in {**before, **wanted}:
        if before.get(name) != wanted.get(name):
            was, now = (settings.get(name, "unset") for settings in (before, wanted))
            what = f"{flag_name(name)} {was}, not {now}"
            raise errors.OtherRunError(f"{described.out} was run with {what}. Choose another --out.")


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**{k: v for k, v in settings.items() if k != "hyper"}, **settings.get("hyper", {})}


def finish_runs(grid: Sequence[Experiment], folder: Path, jobs: int, progress: bool) -> None:
    """Run or resume all unfinished experiments, each in its folder. A failed run does not stop the others."""
    make_folder(folder)
    todo = [one for one in grid if not _is_finished(one)]
    try:
        with Board(grid, shown=progress) as board:
            failed = run_all(todo, min(jobs, len(todo)), board)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"Resume with the same command and --out {folder}") from stop
    if failed:
        kept = f"The other runs are kept. Use the same command with --out {folder} to resume."
        raise errors.UnfinishedError(f"{_explain(failed)} {kept}", failed)


def make_folder(folder: Path) -> None:
    """Create a folder for runs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.FileAccessError(f"cannot write to {folder}: {error.strerror}. Choose another --out.") from error


def _is_finished(one: Experiment) -> bool:
    return (Path(one.out or "") / "result.json").exists()


def _explain(failed: Mapping[str, str]) -> str:
    """Say which runs failed, and why. Runs with the same reason share a sentence."""
    by_reason: dict[str, list[str]] = {}
    for run, reason in failed.items():
        by_reason.setdefault(reason, []).append(Path(run).name)
    return " ".join(
        f"{first} failed: {reason}" + (f" {', '.join(others)} failed for the same reason." if others else "")
        for reason, (first, *others) in by_reason.items()
    )


def _check_partitions(runs: Mapping[str, Sequence[Run]]) -> None:
    """Refuse runs on different data: their difference would not be one of methods."""
    first, *others = runs.values()
    for theirs in others:
        for one, other in zip(first, theirs, strict=True):
            digests = {read_json(run.folder / "partition.json")["digest"] for run in (one, other)}
            if len(digests) > 1:
                where = f"{one.folder} and {other.folder}"
                why = "were run on different data: their partitions differ"
                raise errors.OtherRunError(f"{where} {why}. Choose another --out.")

"""The plan of a comparison: an experiment for every row, all on the same data, partition, models and initial weights.

Everything is checked here, before the first run starts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pluribus import errors
from pluribus.assembly import Assembly, assemble
from pluribus.experiment import (
    TRAINING,
    Experiment,
    defaults_of_data,
    embedded_hyper,
    experiment,
    from_toml,
    known_settings,
)
from pluribus.host import make_host
from pluribus.internal.metrics import METRICS, Metric
from pluribus.internal.views import check_view
from pluribus.method import Method, find
from pluribus.settings import flag_name
from pluribus.storage.files import read_json
from pluribus.storage.toml import read_toml
from pluribus.study.budget import equal_rounds
from pluribus.study.grid import check_counts, is_finished
from pluribus.study.rows import Row, check_rows, to_rows
from pluribus.study.standings import Comparison, Run, find_overridden

Grid = Mapping[tuple[str, int], Experiment]
"""The experiment of each run, by label and seed."""


@dataclass(frozen=True)
class Plan:
    """A comparison that can run."""

    experiments: Mapping[str, Experiment]
    """Experiment of the first seed, by label."""
    seeds: range
    baseline: str
    target: float | None
    view: str
    equal_steps: bool
    overridden: Mapping[str, Mapping[str, Any]]
    parameters: Mapping[str, float]

    def grid(self, place: Callable[[str, int], Path]) -> Grid:
        """The experiments of all runs. `place` gives each run its folder."""
        return {
            (label, number): replace(one, seed=number, out=str(place(label, number)))
            for number in self.seeds
            for label, one in self.experiments.items()
        }

    def read(self, grid: Grid, folder: Path | None) -> Comparison:
        """Read the finished runs of a grid. Without a folder, the runs are not kept, and live in memory alone."""
        return self._read(grid, folder, list(self.experiments))

    def read_finished(self, grid: Grid, folder: Path | None) -> Comparison | None:
        """Compare the rows whose runs are all finished. None if the baseline or all others are not."""
        done = [label for label in self.experiments if all(is_finished(grid[label, number]) for number in self.seeds)]
        return self._read(grid, folder, done) if self.baseline in done and len(done) > 1 else None

    def _read(self, grid: Grid, folder: Path | None, labels: Sequence[str]) -> Comparison:
        runs = {label: tuple(Run.read(grid[label, number], self.view) for number in self.seeds) for label in labels}
        _check_partitions(runs)
        if folder is None:
            runs = {label: tuple(replace(run, folder=None) for run in some) for label, some in runs.items()}
        _check_measured(runs)
        first = statistics.fmean(run.scores["mean"] for run in runs[labels[0]])
        return Comparison(
            experiments={label: self.experiments[label] for label in labels},
            runs=runs,
            baseline=self.baseline,
            target=first if self.target is None else self.target,
            parameters=self.parameters,
            folder=folder,
            view=self.view,
            equal_steps=self.equal_steps,
            overruled={label: some for label, some in self.overridden.items() if label in labels},
            left_out=tuple(label for label in self.experiments if label not in labels),
        )


def plan_comparison(
    rows: Sequence[Row],
    *,
    seeds: int,
    seed: int,
    baseline: str | None,
    target: float | None,
    view: str,
    equal_steps: bool,
    config: str | Path | None,
    own: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> Plan:
    """Check everything that a comparison is given, and plan its runs."""
    described = describe_rows(rows, config, own, {**settings, "seed": seed})
    check_counts(seeds=seeds)
    if baseline is not None and baseline not in described:
        raise errors.UnknownNameError(f"--baseline must be one of {', '.join(described)}, not {baseline}.")
    check_view(view)
    overridden = find_overridden_defaults(rows, described, config, own, settings)
    parameters, metric = _assemble_all(described, seeds)
    if target is not None and not metric.range[0] <= target <= metric.range[1]:
        bounds = ", ".join(f"{one:g}" for one in metric.range)
        raise errors.RangeError(f"--target must be a value of {metric.name}, in [{bounds}], not {target}.")
    if equal_steps:
        rounds = equal_rounds(described)
        described = {label: replace(one, rounds=rounds[label]) for label, one in described.items()}
    first = baseline or next(iter(described))
    return Plan(described, range(seed, seed + seeds), first, target, view, equal_steps, overridden, parameters)


def common_settings(config: str | Path | None) -> dict[str, Any]:
    """Default settings of all rows, from the experiment and a config file."""
    own = ("method", "hyper", "out", "seed")  # of each run
    common = {one.name: one.default for one in fields(Experiment) if one.name not in (*TRAINING, *own)}
    alone = {"threads": 1, "workers": 1}  # runs side by side fill the cores
    return common | alone | {k: v for k, v in _read_config(config).items() if k not in own}


def read_rows(config: str | Path | None) -> list[Row]:
    """The rows in a config file: [rows.LABEL] with `method` and `settings`."""
    rows = {} if config is None else read_toml(Path(config)).get("rows", {})
    if not isinstance(rows, dict):
        raise errors.FormatError(f"rows in {config} must be tables: write [rows.LABEL] above method and settings.")
    return to_rows(rows)


def _read_config(config: str | Path | None) -> dict[str, Any]:
    return from_toml(Path(config), besides=("rows",)) if config is not None else {}


def describe_rows(
    rows: Sequence[Row],
    config: str | Path | None,
    own: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> dict[str, Experiment]:
    """The experiment of each row, from the common settings and those of the row alone. `own` has more of the latter."""
    check_rows(rows)
    for label in own:
        if label not in [row.label for row in rows]:
            raise errors.unknown("row", label, [row.label for row in rows], "pluribus compare --help")
    given, written = {**_read_config(config), **settings}, _read_hyper(config)
    common = {**common_settings(config), **defaults_of_data(given), **settings}
    if common["test"] == "own" and not common["test_fraction"]:
        raise errors.RangeError("a comparison needs test data: --test-fraction must be above 0.")
    described, usual = {}, {name: getattr(Experiment, name) for name in TRAINING}
    for row in rows:
        embedded = {} if isinstance(row.method, Method) else embedded_hyper(find(row.method_name), given)
        alone = {**embedded, **written.get(row.method_name, {}), **row.settings, **own.get(row.label, {})}
        for name in alone:
            if name in known_settings() and name not in TRAINING:
                raise errors.ConflictError(f"{name} is the same for all methods: use {flag_name(name)}.")
        described[row.label] = experiment(row.method, **usual | common | alone)  # no defaults of the method
        described[row.label].build_method()  # checks its hyper-parameters
    return described


def find_overridden_defaults(
    rows: Sequence[Row],
    described: Mapping[str, Experiment],
    config: str | Path | None,
    own: Mapping[str, Mapping[str, Any]],
    settings: Iterable[str],
) -> dict[str, dict[str, Any]]:
    """By label, training defaults of the method that are replaced although the user set no other value."""
    given, written, found = {*settings, *_read_config(config)}, _read_hyper(config), dict[str, dict[str, Any]]()
    for row in rows:
        alone = {*written.get(row.method_name, {}), *row.settings, *own.get(row.label, {})}
        found[row.label] = find_overridden(described[row.label], given | alone)
    return {label: settings for label, settings in found.items() if settings}


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


def _assemble_all(described: Mapping[str, Experiment], seeds: int) -> tuple[dict[str, float], Metric]:
    """Trainable parameters by label, and the headline metric.

    Assembles every run, so that mistakes show before the first one starts.
    """
    found = {}
    for label, one in described.items():
        parts = assemble(one)
        found[label], metric = trainable_parameters(parts), METRICS[parts.task.metrics[0]]
    for number in range(1, seeds):
        one = next(iter(described.values()))
        assemble(replace(one, seed=one.seed + number))
    return found, metric


def trainable_parameters(parts: Assembly) -> float:
    """Number of parameters that the optimizers of a client change, as the mean over clients."""
    host = make_host(parts, lambda k: None)
    sizes = {model: host.client(k).trained_size() for model, k in parts.cards.architectures().items()}
    return statistics.fmean(sizes[card.model] for card in parts.cards.values())


def _check_measured(runs: Mapping[str, Sequence[Run]]) -> None:
    """Refuse a metric that no client has: there is nothing to compare."""
    for label, run in ((label, run) for label, some in runs.items() for run in some):
        if run.scores["mean"] is None:
            raise errors.MissingDataError(
                f"{label}-{run.seed}: no client has a test value of {run.metric.name}, because training diverged or "
                f"the test rows cannot tell. Lower --lr, or choose another metric with --metrics."
            )


def _check_partitions(runs: Mapping[str, Sequence[Run]]) -> None:
    """Refuse runs on different data: their difference would not be one of methods."""
    first, *others = runs.values()
    for theirs in others:
        for one, other in zip(first, theirs, strict=True):
            digests = {_digest(run) for run in (one, other)}
            if len(digests) > 1:
                where = f"{one.folder} and {other.folder}"
                why = "were run on different data: their partitions differ"
                raise errors.OtherRunError(f"{where} {why}. Choose another --out.")


def _digest(run: Run) -> Any:
    assert run.folder is not None, "a run that was just read has a folder"
    return read_json(run.folder / "partition.json")["digest"]

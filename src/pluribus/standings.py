"""Figures of several methods over the same seeds: what each run gave, what that amounts to, and how it is written."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pluribus.experiment import Experiment
from pluribus.fields import flag
from pluribus.files import read_json, read_lines
from pluribus.method import hyperparameters
from pluribus.paired import LEVEL, Difference, difference, holm
from pluribus.result import views_text
from pluribus.tables import Cell, Table, cells, markdown_of
from pluribus.track.console import human

OWN = ("epochs", "batch_size", "optimizer", "lr", "momentum", "weight_decay", "lr_decay")
"""How clients train: each method as it is used to, where nothing is said. All other settings hold for all methods."""

ENOUGH_SEEDS = 5  # docs/compare.md has how often a difference is found where there is none

ACCURACIES = {"mean": "mean", "weighted": "weighted", "worst": "worst", "last": "last round"}


@dataclass(frozen=True)
class Run:
    """A finished run, as its folder has it."""

    method: str
    seed: int
    folder: Path
    result: dict[str, Any]
    history: list[dict[str, Any]]

    @classmethod
    def read(cls, described: Experiment) -> Run:
        """What lies in the experiment's folder."""
        folder = Path(described.out or "")
        history = read_lines(folder / "metrics.jsonl")
        return cls(described.method, described.seed, folder, read_json(folder / "result.json"), history)

    @property
    def view(self) -> str:
        """Which model the headline asks."""
        return str(next(iter(self.result["summary"])))

    @property
    def accuracies(self) -> dict[str, float]:
        """Test accuracies: over clients, selected on validation, and the mean over clients in the last round."""
        summary = self.result["summary"][self.view]
        return {**summary["selected"]["test"], "last": summary["last"]["test"]["mean"]}

    @property
    def by_client(self) -> dict[int, float]:
        """Selected test accuracy of every client that has test data."""
        selected = {int(k): client["selected"]["test"] for k, client in self.result["clients"].items()}
        return {k: accuracy for k, accuracy in selected.items() if accuracy is not None}

    def reached(self, target: float) -> tuple[int, int] | None:
        """Rounds and bytes, up and down, until the mean test accuracy was first there; None: it never was."""
        travelled = 0
        for record in self.history:
            travelled += record["bytes"]["up"] + record["bytes"]["down"]
            if record["mean"] and record["mean"][self.view]["test"]["mean"] >= target:
                return record["round"] + 1, travelled
        return None


@dataclass(frozen=True)
class Spread:
    """A figure over seeds."""

    mean: float
    std: float | None
    """Standard deviation of the sample; None of one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Over seeds."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.std is None else f"{self.mean:.3f} ± {self.std:.3f}"


@dataclass(frozen=True)
class Row:
    """A method's figures. Bytes, seconds and what it took to the target are means over seeds."""

    method: str
    accuracies: dict[str, Spread]
    up: float
    down: float
    rounds_to_target: float | None
    bytes_to_target: float | None
    """None where a seed never reached it."""
    reached: int
    """Seeds that did."""
    seconds: float
    parameters: float
    """Trainable ones of a client, the mean over clients."""


@dataclass(frozen=True)
class Compared:
    """A method against the baseline."""

    method: str
    difference: Difference
    p: float
    """After Holm's correction for all methods of the comparison."""

    @property
    def verdict(self) -> str:
        """In words."""
        return self.difference.verdict(self.p)


def compared(runs: Mapping[str, Sequence[Run]], baseline: str) -> list[Compared]:
    """Everyone else against the baseline, with the seeds that both have; who shares none with it is left out."""
    pairs = {name: _pairs(runs[name], runs[baseline]) for name in runs if name != baseline}
    found = {name: difference(by_seed) for name, by_seed in pairs.items() if by_seed}
    corrected = holm([one.p for one in found.values()])
    return [Compared(name, one, p) for (name, one), p in zip(found.items(), corrected, strict=True)]


def _pairs(runs: Sequence[Run], baseline: Sequence[Run]) -> list[list[float]]:
    """By seed, the differences of its clients."""
    bases = {run.seed: run.by_client for run in baseline}
    by_seed = []
    for run in runs:
        base = bases.get(run.seed, {})
        if pairs := [mine - base[k] for k, mine in run.by_client.items() if k in base]:
            by_seed.append(pairs)
    return by_seed


def too_few(seeds: int) -> str:
    """What to know of differences over few seeds."""
    if seeds == 1:
        return "With one seed only clients are drawn anew: a difference shown is one of this seed."
    return f"{seeds} seeds are few: where much depends on the seed, noise is taken for a difference too often."


def table_of_differences(baseline: str, differences: Sequence[Compared]) -> Table:
    """Differences to the baseline as a table."""
    headings = (f"against {baseline}", "difference", "95 % interval", "p", "")
    rows = [
        (
            Cell(one.method),
            Cell(f"{one.difference.mean:+.3f}"),
            Cell(f"{one.difference.low:+.3f} to {one.difference.high:+.3f}"),
            Cell("<0.001" if one.p < 0.001 else f"{one.p:.3f}"),
            Cell(one.verdict),
        )
        for one in differences
    ]
    return Table(headings, tuple(rows))


@dataclass(frozen=True)
class Comparison:
    """Figures of several methods over the same seeds, and which differences are more than noise.

    >>> import pluribus                                                     # doctest: +SKIP
    >>> found = pluribus.compare(["local", "fedgh"], clients=8, seeds=3)    # doctest: +SKIP
    >>> found.table(), found.to_latex(), found.runs["fedgh"][0].folder      # doctest: +SKIP
    """

    experiments: Mapping[str, Experiment]
    """By method, of the first seed."""
    runs: Mapping[str, tuple[Run, ...]]
    """By method, in the order of seeds."""
    baseline: str
    target: float
    parameters: Mapping[str, float]
    folder: Path

    @cached_property
    def rows(self) -> list[Row]:
        """A row per method."""
        return [self._row(method, runs) for method, runs in self.runs.items()]

    def _row(self, method: str, runs: Sequence[Run]) -> Row:
        reached = [found for run in runs if (found := run.reached(self.target))]
        rounds, travelled = (
            map(statistics.fmean, zip(*reached, strict=True)) if len(reached) == len(runs) else (None,) * 2
        )
        return Row(
            method=method,
            accuracies={name: Spread.of([run.accuracies[name] for run in runs]) for name in ACCURACIES},
            up=statistics.fmean(run.result["bytes"]["up"] for run in runs),
            down=statistics.fmean(run.result["bytes"]["down"] for run in runs),
            rounds_to_target=rounds,
            bytes_to_target=travelled,
            reached=len(reached),
            seconds=statistics.fmean(run.result["seconds"] for run in runs),
            parameters=self.parameters[method],
        )

    @cached_property
    def differences(self) -> list[Compared]:
        """Every other method against the baseline."""
        return compared(self.runs, self.baseline)

    # ---- as text ---------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> list[Table]:
        """Accuracy, cost, and differences where there are any."""
        differences = [table_of_differences(self.baseline, self.differences)] if self.differences else []
        return [self._accuracy(), self._cost(), *differences]

    def _accuracy(self) -> Table:
        columns = [[row.accuracies[name] for row in self.rows] for name in ACCURACIES]
        means = [[spread.mean for spread in column] for column in columns]
        marked = [cells([*map(str, column)], mean, max(mean)) for column, mean in zip(columns, means, strict=True)]
        return self._table(("method", *ACCURACIES.values()), marked)

    def _cost(self) -> Table:
        rows = self.rows
        headings = ("method", "up", "down", f"rounds to {self.target:.3f}", "bytes to it", "seconds", "parameters")
        rounds, travelled = [row.rounds_to_target for row in rows], [row.bytes_to_target for row in rows]
        columns = [
            [Cell(human(row.up)) for row in rows],
            [Cell(human(row.down)) for row in rows],
            cells([_dashed(value, _rounds) for value in rounds], rounds, _least(rounds)),
            cells([_dashed(value, human) for value in travelled], travelled, _least(travelled)),
            [Cell(f"{row.seconds:.1f}") for row in rows],
            [Cell(f"{row.parameters:,.0f}") for row in rows],
        ]
        return self._table(headings, columns)

    def _table(self, headings: tuple[str, ...], columns: Sequence[Sequence[Cell]]) -> Table:
        names = [Cell(row.method) for row in self.rows]
        return Table(headings, tuple(zip(names, *columns, strict=True)))

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the figures."""
        return [*self._about_figures(), *self._about_training(), *self._about_differences(), *self._warnings()]

    def _about_figures(self) -> Iterator[str]:
        seeds = [run.seed for run in next(iter(self.runs.values()))]
        when = views_text({method: runs[0].view for method, runs in self.runs.items()})
        yield f"mean, weighted, worst: test accuracy over clients, selected on validation, {when}; last round: mean."
        if len(seeds) > 1:
            yield f"±: standard deviation over {len(seeds)} seeds ({seeds[0]} to {seeds[-1]})."
        else:
            yield f"One seed ({seeds[0]}): nothing here says how other seeds would turn out."
        short = [f"{row.method} {row.reached} of {len(seeds)}" for row in self.rows if row.reached < len(seeds)]
        if short:
            yield f"{self.target:.3f} was not reached with every seed: {', '.join(short)}."

    def _about_training(self) -> Iterator[str]:
        for name in OWN:
            values = {method: getattr(one, name) for method, one in self.experiments.items()}
            if len(set(values.values())) > 1:
                each = ", ".join(f"{method} {value}" for method, value in values.items())
                yield f"Training differs, {flag(name)}: {each}."

    def _about_differences(self) -> Iterator[str]:
        if not self.differences:
            return
        pairs, several = self.differences[0].difference.pairs, len(self.differences)
        corrected = f", corrected for {several} methods (Holm)" if several > 1 else ""
        yield (
            f"Differences are per client and seed, {pairs} pairs. p: sign flips{corrected}. Interval: seeds drawn "
            f"anew, then clients. Better or worse: p below {LEVEL} and an interval without 0."
        )
        seeds = len(next(iter(self.runs.values())))
        if seeds < ENOUGH_SEEDS:
            yield too_few(seeds)

    def _warnings(self) -> Iterator[str]:
        told: dict[str, list[str]] = {}
        for run in (run for runs in self.runs.values() for run in runs):
            for text in run.result["warnings"]:
                told.setdefault(text, []).append(run.folder.name)
        for text, where in told.items():
            yield f"{where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}: {text}"

    def table(self) -> None:
        """Print it."""
        from pluribus.track.board import print_comparison

        print_comparison(self)

    def to_markdown(self) -> str:
        """The tables and notes in Markdown."""
        return markdown_of(self.tables, self.notes)

    def to_latex(self) -> str:
        """The tables for LaTeX with the package booktabs; the notes are comments."""
        notes = "".join(f"% {note}\n" for note in self.notes)
        return "\n".join([*(table.to_latex() for table in self.tables), notes])

    def to_csv(self) -> str:
        """A row per method, all figures unrounded."""
        against = {one.method: one for one in self.differences}
        text = io.StringIO()
        rows = [_flat(row, against.get(row.method)) for row in self.rows]
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        one = next(iter(self.experiments.values()))
        return {
            "methods": list(self.runs),
            "seeds": [run.seed for run in next(iter(self.runs.values()))],
            "data": one.data,
            "clients": one.clients,
            "rounds": one.rounds,
            "baseline": self.baseline,
            "target": self.target,
            "rows": [asdict(row) for row in self.rows],
            "differences": [
                {"method": one.method, **asdict(one.difference), "p_holm": one.p, "verdict": one.verdict}
                for one in self.differences
            ],
            "training": {m: {name: getattr(e, name) for name in OWN} for m, e in self.experiments.items()},
            "hyper": {m: hyperparameters(e.build_method()) for m, e in self.experiments.items()},
            "notes": self.notes,
            "folder": str(self.folder),
            "runs": {method: [str(run.folder) for run in runs] for method, runs in self.runs.items()},
            "torch": torch.__version__,
        }


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _dashed(value: float | None, spelled: Callable[[float], str]) -> str:
    return "-" if value is None else spelled(value)


def _rounds(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _flat(row: Row, against: Compared | None) -> dict[str, Any]:
    figures = asdict(row)
    spreads = figures.pop("accuracies")
    flat = {"method": figures.pop("method")}
    for name, spread in spreads.items():
        flat |= {name: spread["mean"], f"{name}_std": spread["std"]}
    flat |= figures
    names = ("mean", "low", "high", "p", "pairs", "seeds")
    found = {f"difference_{name}": against and getattr(against.difference, name) for name in names}
    return flat | found | {"p_holm": against and against.p, "verdict": against and against.verdict}

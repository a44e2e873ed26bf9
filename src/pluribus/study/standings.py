"""Figures of several methods over the same seeds: what each run gave, what that amounts to, and how it is written."""

from __future__ import annotations

import csv
import io
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pluribus.evaluate import Figures, choose, is_loss, over_clients, selection_text
from pluribus.experiment import TRAINING, Experiment
from pluribus.internal.views import AFTER, shown, views_text
from pluribus.method import find, hyperparameters
from pluribus.settings import flag_name
from pluribus.storage.files import read_json, read_lines
from pluribus.study.significance import LEVEL, Difference, difference, holm
from pluribus.study.tables import Cell, Table, cells, markdown_of
from pluribus.terminal import MOST_APART, human

DIFFERENT_VIEWS, OWN_DEFAULT, NOT_KEPT = "different views", "own default differs", "not kept"
"""Why two rows are not tested against each other: other models were asked, a method was not run as it is used to and
nobody asked for that, or figures per client are gone."""
SAID_OF_VIEWS = "Different views: one model before training against another after it would be no comparison of methods."
FOR_ONE = ", or for one method with --set {method}.{name}={value}"

ENOUGH_SEEDS = 5  # docs/compare.md has how often a difference is found where there is none

ACCURACIES = {"mean": "mean", "weighted": "weighted", "worst": "worst", "last": "last round"}
"""Columns of the table of accuracies: as many as 80 characters have room for. JSON and CSV have `best` too."""


@dataclass(frozen=True)
class Run:
    """A finished run, as its folder has it."""

    method: str
    seed: int
    folder: Path
    result: dict[str, Any]
    history: list[dict[str, Any]]
    wanted: str = "own"
    """The view that is asked for."""

    @classmethod
    def read(cls, described: Experiment, view: str = "own") -> Run:
        """What lies in the experiment's folder."""
        folder = Path(described.out or "")
        history = read_lines(folder / "metrics.jsonl")
        return cls(described.method, described.seed, folder, read_json(folder / "result.json"), history, view)

    @property
    def headline(self) -> str:
        """The method's own view."""
        return str(next(iter(self.result["summary"])))

    @property
    def view(self) -> str:
        """Which model the figures ask."""
        return shown(self.result["summary"], self.wanted)

    @property
    def accuracies(self) -> dict[str, float]:
        """Test accuracies: over clients, selected on validation, and the mean over clients in the last round."""
        last = self.over_clients(self.view, "last", "test")["mean"]
        return {**self.over_clients(self.view, "selected", "test"), "last": last}

    def over_clients(self, view: str, moment: str, figure: str) -> dict[str, Any]:
        """A figure over clients: `mean`, `weighted`, `worst` and `best`.

        Older runs did not keep the best. It is taken from what each client had, and left out where that is gone.
        """
        found = dict(self.result["summary"][view][moment].get(figure, {}))
        each = None if not found or "best" in found else self._each(view, moment)
        if each is not None:
            values = {k: one.get(figure) for k, one in each.items()}
            found["best"] = over_clients(values, Counter(), is_loss(figure))["best"]
        return found

    @property
    def by_view(self) -> dict[str, float]:
        """Test accuracy, mean over clients, selected on validation, in every view that the method has."""
        return {view: moments["selected"]["test"]["mean"] for view, moments in self.result["summary"].items()}

    @property
    def by_client(self) -> dict[int, float] | None:
        """Selected test accuracy of every client that has test data; None where those of the view were not kept."""
        each = self._each(self.view, "selected")
        if each is None:
            return None
        return {k: accuracy for k, one in each.items() if (accuracy := one.get("test")) is not None}

    def _each(self, view: str, moment: str) -> Mapping[int, Figures] | None:
        """The figures of every client; None where they were not kept."""
        clients = {int(k): client for k, client in self.result["clients"].items()}
        if view != self.headline:
            clients = {k: client.get("views", {}).get(view, {}) for k, client in clients.items()}
        if all(moment in client for client in clients.values()):
            return {k: client[moment] for k, client in clients.items()}
        if self.history:
            return {k: getattr(chosen, moment) for k, chosen in choose(self.history, view).items()}
        return None

    @property
    def steps(self) -> float | None:
        """Gradient steps per client; None where nobody counted them."""
        return (self.result.get("steps") or {}).get("per_client")

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

    @classmethod
    def by_view(cls, runs: Sequence[Run]) -> dict[str, Spread]:
        """The mean test accuracy in every view, over the seeds of a method."""
        return {view: cls.of([run.by_view[view] for run in runs]) for view in runs[0].by_view}

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.std is None else f"{self.mean:.3f} ± {self.std:.3f}"


@dataclass(frozen=True)
class Row:
    """A method's figures. Bytes, seconds and what it took to the target are means over seeds."""

    method: str
    view: str
    """Which model the accuracies ask."""
    accuracies: dict[str, Spread]
    by_view: dict[str, Spread]
    """The mean in every view that the method has."""
    rounds: int
    steps: float | None
    """Gradient steps per client; None where nobody counted them."""
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
    """A method against the baseline; without figures where the two cannot be tested against each other."""

    method: str
    difference: Difference | None
    p: float | None
    """After Holm's correction for all methods that were tested."""
    why: str = ""
    """In a few words, why there is no test."""
    steps: tuple[float, float] | None = None
    """Gradient steps per client, of the method and of the baseline."""

    @property
    def unequal(self) -> bool:
        """Whether one of the two had so many more steps that the verdict is about that, too."""
        return self.steps is not None and abs(self.steps[0] - self.steps[1]) > MOST_APART * self.steps[1]

    @property
    def marked(self) -> str:
        """The verdict as tables show it, with a mark where steps differ."""
        return f"{self.verdict} †" if self.difference and self.unequal else self.verdict

    @property
    def verdict(self) -> str:
        """In words."""
        if self.difference is None or self.p is None:
            return self.why
        return self.difference.verdict(self.p)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """As a row of a table."""
        if self.difference is None or self.p is None:
            return (Cell(self.method), Cell("-"), Cell("-"), Cell("-"), Cell(self.why))
        one = self.difference
        figures = f"{one.mean:+.3f}", f"{one.low:+.3f} to {one.high:+.3f}", f"{self.p:.3f}"
        return (
            Cell(self.method),
            *map(Cell, figures[:2]),
            Cell("<0.001" if self.p < 0.001 else figures[2]),
            Cell(self.marked),
        )

    def to_json(self) -> dict[str, Any]:
        """Its figures as plain values, None where there is no test."""
        names = [one.name for one in fields(Difference)]
        told = {name: getattr(self.difference, name, None) for name in names}
        mine, base = self.steps or (None, None)
        counted = {"steps": mine, "steps_of_baseline": base, "unequal_steps": self.unequal}
        return told | {"p_holm": self.p, "verdict": self.verdict} | counted


def compared(
    runs: Mapping[str, Sequence[Run]], baseline: str, untested: Mapping[str, str] | None = None
) -> list[Compared]:
    """Everyone else against the baseline, with the seeds that both have; who shares none with it is left out.

    `untested` says of whom there shall be no verdict, and why.
    """
    base, found = runs[baseline], dict[str, Difference | str]()
    for name in runs:
        if name == baseline or not {run.seed for run in runs[name]} & {run.seed for run in base}:
            continue
        why = _different_views(runs[name], base) or (untested or {}).get(name) or _not_kept(runs[name], base)
        if why:
            found[name] = why
        elif by_seed := _pairs(runs[name], base):
            found[name] = difference(by_seed)
    tested = {name: one for name, one in found.items() if isinstance(one, Difference)}
    corrected = dict(zip(tested, holm([one.p for one in tested.values()]), strict=True))
    steps = {name: _both(mean_steps(runs[name]), mean_steps(base)) for name in found}
    return [
        Compared(name, one, corrected[name], steps=steps[name])
        if isinstance(one, Difference)
        else Compared(name, None, None, one, steps[name])
        for name, one in found.items()
    ]


def mean_steps(runs: Sequence[Run]) -> float | None:
    """Gradient steps per client, the mean over seeds; None where a run did not count them."""
    known = [run.steps for run in runs if run.steps is not None]
    return statistics.fmean(known) if len(known) == len(runs) else None


def _both(mine: float | None, base: float | None) -> tuple[float, float] | None:
    return None if mine is None or base is None else (mine, base)


def about_steps(differences: Sequence[Compared], baseline: str, remedy: str = "") -> Iterator[str]:
    """What the mark at verdicts is about."""
    marked = [(one.method, *one.steps) for one in differences if one.steps and one.marked != one.verdict]
    if marked:
        each = ", ".join(f"{name} {mine:,.0f} ({_times(mine, base)})" for name, mine, base in marked)
        base = marked[0][2]
        yield f"† Gradient steps per client differ from {baseline}'s {base:,.0f} by more than a tenth: {each}.{remedy}"


def _times(mine: float, base: float) -> str:
    return f"{mine / base:.1f} times as many" if base else "not 0"


def _different_views(runs: Sequence[Run], baseline: Sequence[Run]) -> str:
    return DIFFERENT_VIEWS if len({run.view for run in (*runs, *baseline)}) > 1 else ""


def _not_kept(runs: Sequence[Run], baseline: Sequence[Run]) -> str:
    return NOT_KEPT if any(run.by_client is None for run in (*runs, *baseline)) else ""


def _pairs(runs: Sequence[Run], baseline: Sequence[Run]) -> list[list[float]]:
    """By seed, the differences of its clients."""
    bases = {run.seed: run.by_client or {} for run in baseline}
    by_seed = []
    for run in runs:
        base = bases.get(run.seed, {})
        if pairs := [mine - base[k] for k, mine in (run.by_client or {}).items() if k in base]:
            by_seed.append(pairs)
    return by_seed


def chosen_text(runs: Iterable[Run]) -> str:
    """How the rounds of the figures were chosen, in words."""
    return selection_text(client["selected"]["val"] for run in runs for client in run.result["clients"].values())


def corrected_for(differences: Sequence[Compared], what: str) -> str:
    """How often p was corrected, in words."""
    tests = sum(one.difference is not None for one in differences)
    return f", corrected for {tests} {what} (Holm)" if tests > 1 else ""


def too_few(seeds: int) -> str:
    """What to know of differences over few seeds."""
    if seeds == 1:
        return "With one seed only clients are drawn anew: a difference shown is one of this seed."
    return f"{seeds} seeds are few: where much depends on the seed, noise is taken for a difference too often."


def overruled(described: Experiment, given: Container[str]) -> dict[str, Any]:
    """A method's own defaults of training that do not hold in an experiment, but for those that someone has given."""
    own, now = find(described.method).defaults, vars(described)
    return {name: own[name] for name in TRAINING if name in own and name not in given and own[name] != now[name]}


def about_defaults(
    overruled: Mapping[str, Mapping[str, Any]], experiments: Mapping[str, Experiment], for_one: str = ""
) -> list[str]:
    """What to know of methods that were not run as they are used to, a sentence for each setting and value."""
    whose: dict[tuple[str, Any, Any], list[str]] = {}
    for method, settings in overruled.items():
        for name, own in settings.items():
            whose.setdefault((name, own, vars(experiments[method])[name]), []).append(method)
    return [
        f"{', '.join(methods)}: {flag_name(name)} is {own} by default, but here it is {ran}, as for all methods, so "
        f"there is no verdict. Set it for all with {flag_name(name)}"
        f"{for_one.format(method=methods[0], name=name, value=own)}."
        for (name, own, ran), methods in whose.items()
    ]


def table_of_differences(baseline: str, differences: Sequence[Compared]) -> Table:
    """Differences to the baseline as a table."""
    headings = (f"against {baseline}", "difference", "95 % interval", "p", "")
    return Table(headings, tuple(one.cells for one in differences))


def tables_of_views(
    headings: tuple[str, str], runs: Mapping[str, Sequence[Run]], with_cost: bool = False
) -> list[Table]:
    """The mean accuracy in every view that a row has, where there are several; the one asked for comes first."""
    found = {name: Spread.by_view(some) for name, some in runs.items()}
    there = dict.fromkeys(view for one in found.values() for view in one)
    asked = {some[0].wanted for some in runs.values()}
    views = sorted(there, key=lambda view: view not in asked)
    if len(views) == 1 and not with_cost:
        return []
    columns = []
    for view in views:
        means = [one[view].mean if view in one else None for one in found.values()]
        columns.append(cells([_dashed(mean, "{:.3f}".format) for mean in means], means, _most(means)))
    names, seen = [Cell(name) for name in found], [Cell(some[0].view) for some in runs.values()]
    cost = _costs(runs.values()) if with_cost else {}
    return [Table((*headings, *views, *cost), tuple(zip(names, seen, *columns, *cost.values(), strict=True)))]


def _costs(rows: Collection[Sequence[Run]]) -> dict[str, list[Cell]]:
    """Columns of gradient steps per client, and of bytes both ways, means over seeds."""
    columns = {"steps": [Cell(_dashed(mean_steps(runs), "{:,.0f}".format)) for runs in rows]}
    for way in ("up", "down"):
        columns[way] = [Cell(human(statistics.fmean(run.result["bytes"][way] for run in runs))) for runs in rows]
    return columns


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
    view: str = AFTER
    """The one that was asked for."""
    equal_steps: bool = False
    """Whether rows have as many rounds as give them the same number of gradient steps."""
    overruled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By method, its own defaults of training that did not hold, though nobody asked for other values."""
    left_out: tuple[str, ...] = ()
    """Methods of which a run failed."""

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
            view=runs[0].view,
            by_view=Spread.by_view(runs),
            accuracies=_spreads(runs),
            rounds=self.experiments[method].rounds,
            steps=mean_steps(runs),
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
        strange = self.runs if self.baseline in self.overruled else self.overruled
        return compared(self.runs, self.baseline, dict.fromkeys(strange, OWN_DEFAULT))

    # ---- as text ---------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> list[Table]:
        """Accuracy, cost and what it took to the target; views and differences where there are several."""
        differences = [table_of_differences(self.baseline, self.differences)] if self.differences else []
        return [
            self._accuracy(),
            *tables_of_views(("method", "shown above"), self.runs),
            self._cost(),
            self._to_target(),
            *differences,
        ]

    @property
    def _one_view(self) -> bool:
        """Whether all rows ask the same model; if not, none of them is the best."""
        return len({row.view for row in self.rows}) == 1

    def _accuracy(self) -> Table:
        columns = [[row.accuracies[name] for row in self.rows] for name in ACCURACIES]
        means = [[spread.mean for spread in column] for column in columns]
        marked = [
            cells([*map(str, column)], mean, max(mean) if self._one_view else None)
            for column, mean in zip(columns, means, strict=True)
        ]
        return self._table(("method", *ACCURACIES.values()), marked)

    def _cost(self) -> Table:
        rows = self.rows
        columns = [
            [Cell(_dashed(row.steps, "{:,.0f}".format)) for row in rows],
            [Cell(human(row.up)) for row in rows],
            [Cell(human(row.down)) for row in rows],
            [Cell(f"{row.seconds:.1f}") for row in rows],
            [Cell(f"{row.parameters:,.0f}") for row in rows],
        ]
        return self._table(("method", "steps", "up", "down", "seconds", "parameters"), columns)

    def _to_target(self) -> Table:
        rows = self.rows
        rounds, travelled = [row.rounds_to_target for row in rows], [row.bytes_to_target for row in rows]
        least = _least if self._one_view else lambda values: None
        columns = [
            cells([_dashed(value, _rounds) for value in rounds], rounds, least(rounds)),
            cells([_dashed(value, human) for value in travelled], travelled, least(travelled)),
        ]
        return self._table(("method", f"rounds to {self.target:.3f}", "bytes to it"), columns)

    def _table(self, headings: tuple[str, ...], columns: Sequence[Sequence[Cell]]) -> Table:
        names = [Cell(row.method) for row in self.rows]
        return Table(headings, tuple(zip(names, *columns, strict=True)))

    @property
    def cautions(self) -> list[str]:
        """What a reader must know before the figures."""
        missing = f"Left out, because runs of theirs failed: {', '.join(self.left_out)}."
        return [missing] * bool(self.left_out) + about_defaults(self.overruled, self.experiments, FOR_ONE)

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the figures."""
        return [*self._about_figures(), *self._about_training(), *self._about_differences(), *self._warnings()]

    def _about_figures(self) -> Iterator[str]:
        seeds = [run.seed for run in next(iter(self.runs.values()))]
        when = views_text({method: runs[0].view for method, runs in self.runs.items()})
        chosen = chosen_text(run for runs in self.runs.values() for run in runs)
        yield f"mean, weighted, worst: test accuracy over clients, {chosen}, {when}; last round: mean."
        if len(seeds) > 1:
            yield f"±: standard deviation over {len(seeds)} seeds ({seeds[0]} to {seeds[-1]})."
        else:
            yield f"One seed ({seeds[0]}): nothing here says how other seeds would turn out."
        short = [f"{row.method} {row.reached} of {len(seeds)}" for row in self.rows if row.reached < len(seeds)]
        if short:
            yield f"{self.target:.3f} was not reached with every seed: {', '.join(short)}."

    def _about_training(self) -> Iterator[str]:
        if self.equal_steps:
            rounds = ", ".join(f"{row.method} {row.rounds}" for row in self.rows)
            taken = sorted(row.steps or 0 for row in self.rows)
            yield f"Equal steps: {taken[0]:,.0f} to {taken[-1]:,.0f} gradient steps per client. Rounds: {rounds}."
        for name in TRAINING:
            values = {method: getattr(one, name) for method, one in self.experiments.items()}
            if len(set(values.values())) > 1:
                each = ", ".join(f"{method} {value}" for method, value in values.items())
                yield f"Training differs, {flag_name(name)}: {each}."

    def _about_differences(self) -> Iterator[str]:
        if not self.differences:
            return
        if any(one.why == DIFFERENT_VIEWS for one in self.differences):
            yield SAID_OF_VIEWS
        tested = [one.difference for one in self.differences if one.difference is not None]
        if not tested:
            return
        corrected = corrected_for(self.differences, "methods")
        yield (
            f"Differences are per client and seed, {tested[0].pairs} pairs. p: sign flips{corrected}. Interval: seeds "
            f"drawn anew, then clients. Better or worse: p below {LEVEL} and an interval without 0."
        )
        remedy = "" if self.equal_steps else " --equal-steps gives every row the same number."
        yield from about_steps(self.differences, self.baseline, remedy)
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
        from pluribus.study.board import print_comparison

        print_comparison(self)

    def to_markdown(self) -> str:
        """The tables and notes in Markdown."""
        return markdown_of(self.tables, self.notes, self.cautions)

    def to_latex(self) -> str:
        """The tables for LaTeX with the package booktabs; the notes are comments."""
        cautions, notes = ("".join(f"% {text}\n" for text in texts) for texts in (self.cautions, self.notes))
        return cautions + "\n".join([*(table.to_latex() for table in self.tables), notes])

    def to_csv(self) -> str:
        """A row per method, all figures unrounded."""
        against = {one.method: one for one in self.differences}
        text = io.StringIO()
        views = dict.fromkeys(view for row in self.rows for view in row.by_view)
        rows = [_flat(row, views, against.get(row.method)) for row in self.rows]
        columns = dict.fromkeys(name for row in rows for name in row)
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
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
            "rounds": min(row.rounds for row in self.rows),
            "equal_steps": self.equal_steps,
            "view": self.view,
            "baseline": self.baseline,
            "target": self.target,
            "rows": [asdict(row) for row in self.rows],
            "differences": [{"method": one.method, **one.to_json()} for one in self.differences],
            "training": {m: {name: getattr(e, name) for name in TRAINING} for m, e in self.experiments.items()},
            "hyper": {m: hyperparameters(e.build_method()) for m, e in self.experiments.items()},
            "cautions": self.cautions,
            "notes": self.notes,
            "folder": str(self.folder),
            "runs": {method: [str(run.folder) for run in runs] for method, runs in self.runs.items()},
            "torch": torch.__version__,
        }


def _spreads(runs: Sequence[Run]) -> dict[str, Spread]:
    """The accuracies of a method; the best client's only where every run has it."""
    found = [run.accuracies for run in runs]
    names = [*ACCURACIES, *(["best"] if all(one.get("best") is not None for one in found) else [])]
    return {name: Spread.of([one[name] for one in found]) for name in names}


def _most(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _dashed(value: float | None, spelled: Callable[[float], str]) -> str:
    return "-" if value is None else spelled(value)


def _rounds(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _flat(row: Row, views: Iterable[str], against: Compared | None) -> dict[str, Any]:
    figures = asdict(row)
    spreads, by_view = figures.pop("accuracies"), figures.pop("by_view")
    flat = {"method": figures.pop("method")}
    for name, spread in {**spreads, **{view: by_view.get(view) for view in views}}.items():
        flat |= {name: spread and spread["mean"], f"{name}_std": spread and spread["std"]}
    flat |= figures
    told = against.to_json() if against else dict.fromkeys(Compared("", None, None).to_json())
    del told["steps"]  # the row has them
    own = ("p_holm", "verdict", "steps_of_baseline", "unequal_steps")
    return flat | {name if name in own else f"difference_{name}": value for name, value in told.items()}

"""Results of several methods over the same seeds: of every run, in total, and as tables and notes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pluribus.errors import to_words
from pluribus.evaluate import OVER_CLIENTS, Chosen, Metrics, choose, evaluated_clients, over_clients, selection_text
from pluribus.experiment import TRAINING, Experiment
from pluribus.internal.frames import make_frame
from pluribus.internal.metrics import Metric, headline_of, is_smaller_better
from pluribus.internal.tables import Cell, Table, cells, csv_of, html_of, latex_of, markdown_of, write_to
from pluribus.internal.views import AFTER, choose_view, views_text
from pluribus.method import find, hyperparameters
from pluribus.settings import flag_name
from pluribus.storage.history import read_metrics, read_summary
from pluribus.study.figure import draw_rounds, save
from pluribus.study.significance import LEVEL, Difference, difference, holm
from pluribus.study.tidy import tidy
from pluribus.terminal import MOST_APART, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DIFFERENT_VIEWS, OWN_DEFAULT, NOT_KEPT = "different views", "own default differs", "not kept"
"""Why two rows are not tested against each other: their views differ, a training default of a method was replaced
although the user did not ask for it, or the results per client were not kept."""
SAID_OF_VIEWS = "Different views: a model before local training cannot be compared with a model after it."
FOR_ONE = ", or for one method with --set {method}.{name}={value}"

ENOUGH_SEEDS = 5  # docs/compare.md has the rates of false differences

COLUMNS = {"mean": "mean", "weighted": "weighted", "worst": "worst", "last": "last round"}
"""Columns of the first table. More do not fit into 80 characters; JSON and CSV have all of OVER_CLIENTS."""


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder."""

    method: str
    seed: int
    folder: Path | None  # None: the run was not kept
    result: dict[str, Any]
    history: list[dict[str, Any]]
    wanted: str = "own"  # the requested view

    @classmethod
    def read(cls, described: Experiment, view: str = "own") -> Run:
        folder = Path(described.out or "")
        history = read_metrics(folder / "metrics.jsonl")
        return cls(described.method, described.seed, folder, read_summary(folder / "result.json"), history, view)

    @property
    def headline(self) -> str:
        """The method's own view."""
        return str(next(iter(self.result["summary"])))

    @property
    def view(self) -> str:
        """The view of the results: the requested one, or the method's own if it lacks that one."""
        return choose_view(self.result["summary"], self.wanted)

    @property
    def metric(self) -> Metric:
        """The headline metric, which all numbers are values of."""
        return headline_of(self.result)

    @property
    def scores(self) -> dict[str, float]:
        """The test metric over clients, selected on validation. `last` is the mean in the last round."""
        last = self.over_clients(self.view, "last", "test").get("mean")
        return {**dict.fromkeys(OVER_CLIENTS), **self.over_clients(self.view, "selected", "test"), "last": last}

    def over_clients(self, view: str, moment: str, metric: str) -> dict[str, Any]:
        """A metric over clients: `mean`, `weighted`, `worst` and so on.

        Older runs did not save all of them. Those are computed from the results per client, if they were kept.
        """
        found = dict(self.result["summary"][view][moment].get(metric, {}))
        missing = [name for name in OVER_CLIENTS if name not in found]
        each = self._each(view, moment) if found and missing else None
        if each is not None:
            values = {k: one.get(metric) for k, one in each.items()}
            computed = over_clients(values, Counter(), is_smaller_better(metric, self.metric))
            found |= {name: computed[name] for name in missing}
        return found

    @property
    def by_view(self) -> dict[str, float]:
        """Mean test metric over clients, selected on validation, in every view of the method."""
        return {view: moments["selected"]["test"]["mean"] for view, moments in self.result["summary"].items()}

    @property
    def by_client(self) -> dict[int, float] | None:
        """Selected test metric of every client that has one. None: not kept for this view."""
        each = self._each(self.view, "selected")
        if each is None:
            return None
        return {k: value for k, one in each.items() if (value := one.get("test")) is not None}

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The evaluated rounds, and the mean test metric over clients in each. Rounds without a value are left out."""
        means = ((one["round"], self._mean(one)) for one in self.history)
        return [(number, value) for number, value in means if value is not None]

    def _mean(self, record: Mapping[str, Any]) -> float | None:
        found: float | None = record["mean"][self.view]["test"]["mean"] if record["mean"] else None
        return found

    def chosen(self, view: str) -> dict[int, Chosen]:
        """Last and selected metrics of every evaluated client in a view."""
        return choose(self.history, view)

    def _each(self, view: str, moment: str) -> Mapping[int, Metrics] | None:
        """The metrics of every client, or None if they were not kept."""
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
        """Gradient steps per client, or None if they were not counted."""
        return (self.result.get("steps") or {}).get("per_client")

    def reached(self, target: float) -> tuple[int, int] | None:
        """Rounds and bytes (up and down) until the mean test metric reached a target. None: it never did."""
        return reach(self.history, self._mean, self.metric, target)


def reach(
    history: Iterable[Mapping[str, Any]],
    value_of: Callable[[Mapping[str, Any]], float | None],
    metric: Metric,
    target: float,
) -> tuple[int, int] | None:
    """Rounds and bytes (up and down) until a value of each round reached a target. None: it never did."""
    traffic = 0
    for record in history:
        traffic += record["bytes"]["up"] + record["bytes"]["down"]
        value = value_of(record)
        if value is not None and not metric.prefers(target, value):
            return record["round"] + 1, traffic
    return None


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a metric over seeds."""

    mean: float
    std: float | None  # standard deviation of the sample; None: there is one seed

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    @classmethod
    def by_view(cls, runs: Sequence[Run]) -> dict[str, Spread]:
        """Mean test metric in every view, over the seeds of a method."""
        return {view: cls.of([run.by_view[view] for run in runs]) for view in runs[0].by_view}

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.std is None else f"{self.mean:.3f} ± {self.std:.3f}"


@dataclass(frozen=True)
class Standing:
    """The results of a row. Bytes, seconds, and rounds and bytes to the target are means over seeds."""

    label: str
    method: str
    view: str  # the view of the scores
    scores: dict[str, Spread]  # the headline metric over clients
    by_view: dict[str, Spread]  # the mean in every view of the method
    rounds: int
    steps: float | None  # gradient steps per client, or None if they were not counted
    up: float
    down: float
    rounds_to_target: float | None
    bytes_to_target: float | None  # None: not every seed reached the target
    reached: int  # number of seeds that reached the target
    seconds: float
    parameters: float | None  # trainable parameters of a client, mean over clients; None: unknown
    epsilon: float | None = None  # most of a privacy budget that a client spent; None: there is none


@dataclass(frozen=True)
class Compared:
    """A row compared with the baseline. Without a test, `difference` and `p` are None."""

    label: str
    difference: Difference | None
    p: float | None  # P-value after Holm's correction for all tested rows
    why: str = ""  # short reason why there is no test
    steps: tuple[float, float] | None = None  # gradient steps per client of the row and of the baseline
    smaller: bool = False  # whether smaller values of the metric are better

    @property
    def unequal(self) -> bool:
        """Whether the steps differ so much that they may explain the verdict."""
        return self.steps is not None and abs(self.steps[0] - self.steps[1]) > MOST_APART * self.steps[1]

    @property
    def marked(self) -> str:
        """The verdict for a table, with a mark if the steps differ."""
        return f"{self.verdict} †" if self.difference and self.unequal else self.verdict

    @property
    def verdict(self) -> str:
        """The result of the test in words, or the reason why there is none."""
        return self.why if self.difference is None or self.p is None else self.difference.verdict(self.p, self.smaller)

    @property
    def cells(self) -> tuple[Cell, ...]:
        one, texts = self.difference, ["-", "-", "-"]
        if one is not None and self.p is not None:
            p = "<0.001" if self.p < 0.001 else f"{self.p:.3f}"
            texts = [f"{one.mean:+.3f}", f"{one.low:+.3f} to {one.high:+.3f}", p]
        return tuple(map(Cell, (self.label, *texts, self.marked)))

    def to_json(self) -> dict[str, Any]:
        """Plain values by name. Without a test they are None."""
        values = {one.name: getattr(self.difference, one.name, None) for one in fields(Difference)}
        mine, base = self.steps or (None, None)
        counted = {"steps": mine, "steps_of_baseline": base, "unequal_steps": self.unequal}
        return values | {"p_holm": self.p, "verdict": self.verdict} | counted


def compare_with_baseline(
    runs: Mapping[str, Sequence[Run]], baseline: str, untested: Mapping[str, str] = {}
) -> list[Compared]:
    """Compare every other row with the baseline, over the seeds that both have. Skip rows without such a seed.

    `untested` holds the rows that are not tested, and the reasons.
    """
    base, why, tested = runs[baseline], dict[str, str](), dict[str, Difference]()
    smaller = base[0].metric.smaller
    for name, mine in runs.items():
        if name == baseline or not {run.seed for run in mine} & {run.seed for run in base}:
            continue
        if len({run.view for run in (*mine, *base)}) > 1:
            why[name] = DIFFERENT_VIEWS
        elif name in untested:
            why[name] = untested[name]
        elif any(run.by_client is None for run in (*mine, *base)):
            why[name] = NOT_KEPT
        elif by_seed := _pairs(mine, base):
            tested[name] = difference(by_seed)
    corrected = dict(zip(tested, holm([one.p for one in tested.values()]), strict=True))
    return [
        Compared(name, tested.get(name), corrected.get(name), why.get(name, ""), _steps_of_both(mine, base), smaller)
        for name, mine in runs.items()
        if name in tested or name in why
    ]


def mean_steps(runs: Sequence[Run]) -> float | None:
    """Gradient steps per client, mean over seeds, or None if a run did not count them."""
    known = [run.steps for run in runs if run.steps is not None]
    return statistics.fmean(known) if len(known) == len(runs) else None


def _steps_of_both(runs: Sequence[Run], baseline: Sequence[Run]) -> tuple[float, float] | None:
    mine, base = mean_steps(runs), mean_steps(baseline)
    return None if mine is None or base is None else (mine, base)


def note_steps(differences: Sequence[Compared], baseline: str, remedy: str = "") -> Iterator[str]:
    """A note that explains the mark † in verdicts."""
    marked = [(one.label, *one.steps) for one in differences if one.steps and one.marked != one.verdict]
    if marked:
        each = ", ".join(f"{name} {mine:,.0f} ({_times(mine, base)})" for name, mine, base in marked)
        base = marked[0][2]
        yield f"† Gradient steps per client differ from {baseline}'s {base:,.0f} by more than a tenth: {each}.{remedy}"


def _times(mine: float, base: float) -> str:
    return f"{mine / base:.1f} times as many" if base else "not 0"


def _pairs(runs: Sequence[Run], baseline: Sequence[Run]) -> list[list[float]]:
    """The differences of the clients, by seed."""
    bases = {run.seed: run.by_client or {} for run in baseline}
    both = [(run.by_client or {}, bases.get(run.seed, {})) for run in runs]
    by_seed = [[mine[k] - base[k] for k in mine if k in base] for mine, base in both]
    return [pairs for pairs in by_seed if pairs]


def selection_note(runs: Iterable[Run]) -> str:
    """Say in words how the rounds of the results were selected."""
    return selection_text(client["selected"]["val"] for run in runs for client in run.result["clients"].values())


def how_tested(differences: Sequence[Compared], what: str) -> str:
    """Say in words how differences were tested, and for how many tests p was corrected."""
    tests = sum(one.difference is not None for one in differences)
    corrected = f", corrected for {tests} {what} (Holm)" if tests > 1 else ""
    return (
        f"p: sign-flip test{corrected}. Interval: bootstrap over seeds, then clients. Better or worse: p below {LEVEL} "
        "and an interval without 0."
    )


def note_few_seeds(seeds: int) -> str:
    """A note about differences over few seeds."""
    if seeds == 1:
        return "With one seed only clients are resampled: a difference holds for this seed only."
    return f"{seeds} seeds are few: if results depend much on the seed, noise passes for a difference too often."


def find_overridden(described: Experiment, given: Container[str]) -> dict[str, Any]:
    """Training defaults of a method that an experiment replaces, without the settings that the user has given."""
    own, now = find(described.method).defaults, vars(described)
    return {name: own[name] for name in TRAINING if name in own and name not in given and own[name] != now[name]}


def note_defaults(
    overruled: Mapping[str, Mapping[str, Any]], experiments: Mapping[str, Experiment], for_one: str = ""
) -> list[str]:
    """Notes about replaced defaults of methods: one sentence for each setting and value."""
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


def differences_table(baseline: str, differences: Sequence[Compared]) -> Table:
    """Make the table of differences from the baseline."""
    return Table((f"against {baseline}", "difference", "95 % interval", "p", ""), [one.cells for one in differences])


def view_tables(headings: tuple[str, str], runs: Mapping[str, Sequence[Run]], with_cost: bool = False) -> list[Table]:
    """Make a table of the mean in every view, if there are several. The requested view comes first."""
    found = {name: Spread.by_view(some) for name, some in runs.items()}
    known = dict.fromkeys(view for one in found.values() for view in one)
    requested = {some[0].wanted for some in runs.values()}
    views = sorted(known, key=lambda view: view not in requested)
    if len(views) == 1 and not with_cost:
        return []
    columns, metric = [], next(iter(runs.values()))[0].metric
    for view in views:
        means = [one[view].mean if view in one else None for one in found.values()]
        columns.append(cells([_format(mean, "{:.3f}".format) for mean in means], means, metric.best(means)))
    names, seen = map(Cell, found), [Cell(some[0].view) for some in runs.values()]
    cost = _costs(runs.values()) if with_cost else {}
    return [Table((*headings, *views, *cost), list(zip(names, seen, *columns, *cost.values(), strict=True)))]


def _costs(rows: Collection[Sequence[Run]]) -> dict[str, list[Cell]]:
    """Columns of gradient steps per client and of bytes up and down, means over seeds."""
    columns = {"steps": [Cell(_format(mean_steps(runs), "{:,.0f}".format)) for runs in rows]}
    for way in ("up", "down"):
        columns[way] = [Cell(format_bytes(statistics.fmean(run.result["bytes"][way] for run in runs))) for runs in rows]
    spent = [most_epsilon(runs) for runs in rows]
    return columns | ({"epsilon": [Cell(_format(one, "{:.2f}".format)) for one in spent]} if any(spent) else {})


def most_epsilon(runs: Sequence[Run]) -> float | None:
    """The largest privacy budget that a client spent. None: the runs have no differential privacy."""
    return max((found for run in runs if (found := run.result.get("epsilon")) is not None), default=None)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Results of several rows over the same seeds, and which differences are more than noise.

    >>> import pluribus                                                     # doctest: +SKIP
    >>> found = pluribus.compare(["local", "fedgh"], clients=8, seeds=3)    # doctest: +SKIP
    >>> found.table(), found.to_latex("table.tex"), found.frame()           # doctest: +SKIP
    >>> found.plot("curves.png")                                            # doctest: +SKIP
    """

    experiments: Mapping[str, Experiment]
    """Experiment of the first seed, by label."""
    runs: Mapping[str, tuple[Run, ...]]
    """Runs in the order of seeds, by label."""
    baseline: str
    target: float
    parameters: Mapping[str, float | None]
    folder: Path | None
    """Folder of the runs. None: they were not kept."""
    view: str = AFTER
    """The requested view."""
    equal_steps: bool = False
    """Whether the rounds were chosen so that all methods take the same number of gradient steps."""
    overruled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By label, training defaults of the method that were replaced although the user set no other value."""
    left_out: tuple[str, ...] = ()
    """Rows with a failed run."""

    @cached_property
    def rows(self) -> list[Standing]:
        return [self._row(label, runs) for label, runs in self.runs.items()]

    def _row(self, label: str, runs: Sequence[Run]) -> Standing:
        reached = [found for run in runs if (found := run.reached(self.target))]
        all_reached = len(reached) == len(runs)
        rounds, traffic = map(statistics.fmean, zip(*reached, strict=True)) if all_reached else (None, None)
        return Standing(
            label=label,
            method=self.experiments[label].method,
            view=runs[0].view,
            by_view=Spread.by_view(runs),
            scores=_spreads(runs),
            rounds=self.experiments[label].rounds,
            steps=mean_steps(runs),
            up=statistics.fmean(run.result["bytes"]["up"] for run in runs),
            down=statistics.fmean(run.result["bytes"]["down"] for run in runs),
            rounds_to_target=rounds,
            bytes_to_target=traffic,
            reached=len(reached),
            seconds=statistics.fmean(run.result["seconds"] for run in runs),
            parameters=self.parameters[label],
            epsilon=most_epsilon(runs),
        )

    @cached_property
    def differences(self) -> list[Compared]:
        untested = self.runs if self.baseline in self.overruled else self.overruled
        return compare_with_baseline(self.runs, self.baseline, dict.fromkeys(untested, OWN_DEFAULT))

    @property
    def metric(self) -> Metric:
        """The headline metric of all runs."""
        return self.runs[self.baseline][0].metric

    # ---- as text ---------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> list[Table]:
        """Tables of the metric, views (if there are several), cost, rounds and bytes to the target, and differences."""
        views = view_tables((self.what, "shown above"), self.runs)
        differences = [differences_table(self.baseline, self.differences)] if self.differences else []
        return [self._scores(), *views, self._cost(), self._to_target(), *differences]

    @property
    def what(self) -> str:
        """What the first column names: methods, or rows if a label is not the name of its method."""
        return "method" if all(label == one.method for label, one in self.experiments.items()) else "row"

    @property
    def one_view(self) -> bool:
        """Whether all rows have the same view. If not, none of them is the best."""
        return len({row.view for row in self.rows}) == 1

    def _scores(self) -> Table:
        columns = []
        for spreads in ([row.scores[name] for row in self.rows] for name in COLUMNS):
            means = [spread.mean for spread in spreads]
            columns.append(cells([*map(str, spreads)], means, self.metric.best(means) if self.one_view else None))
        return self._table((self.what, *COLUMNS.values()), columns)

    def _cost(self) -> Table:
        rows, private = [], any(row.epsilon is not None for row in self.rows)
        for row in self.rows:
            steps, parameters = (_format(one, "{:,.0f}".format) for one in (row.steps, row.parameters))
            texts = row.label, steps, format_bytes(row.up), format_bytes(row.down), f"{row.seconds:.1f}", parameters
            spent = [_format(row.epsilon, "{:.2f}".format)] if private else []
            rows.append([Cell(text) for text in (*texts, *spent)])
        columns = (self.what, "steps", "up", "down", "seconds", "parameters")
        return Table((*columns, *(["epsilon"] if private else [])), rows)

    def _to_target(self) -> Table:
        rounds, traffic = [row.rounds_to_target for row in self.rows], [row.bytes_to_target for row in self.rows]
        columns = [
            cells([_format(value, text) for value in values], values, _least(values) if self.one_view else None)
            for values, text in ((rounds, _rounds), (traffic, format_bytes))
        ]
        return self._table((self.what, f"rounds to {self.target:.3f}", "bytes to it"), columns)

    def _table(self, headings: tuple[str, ...], columns: Sequence[Sequence[Cell]]) -> Table:
        return Table(headings, list(zip((Cell(row.label) for row in self.rows), *columns, strict=True)))

    @property
    def cautions(self) -> list[str]:
        """What a reader must know before the results."""
        missing = f"These rows are left out because their runs failed: {', '.join(self.left_out)}."
        texts = [missing] * bool(self.left_out) + note_defaults(self.overruled, self.experiments, FOR_ONE)
        return list(map(to_words, texts))

    @property
    def notes(self) -> list[str]:
        return list(map(to_words, [*self._about_results(), *self._about_target(), *self._about_runs()]))

    def _about_runs(self) -> Iterator[str]:
        yield from self.about_training()
        yield from self._about_differences()
        yield from self.about_warnings()

    def _about_results(self) -> Iterator[str]:
        when = views_text({method: runs[0].view for method, runs in self.runs.items()})
        chosen = selection_note(run for runs in self.runs.values() for run in runs)
        yield from self.about_rows()
        whose = evaluated_clients(run.history for runs in self.runs.values() for run in runs)
        yield f"mean, weighted, worst: test {self.metric.text} over {whose}, {chosen}, {when}; last round: mean."
        yield self.about_seeds()

    def _about_target(self) -> Iterator[str]:
        seeds = next(iter(self.runs.values()))
        if short := [f"{row.label} {row.reached} of {len(seeds)}" for row in self.rows if row.reached < len(seeds)]:
            yield f"Not every seed reached {self.target:.3f}: {', '.join(short)}."

    def about_rows(self, without: Container[str] = ()) -> Iterator[str]:
        """What the labels stand for, if they are not the names of methods. Some settings are said elsewhere."""
        if self.what == "row":
            texts = {label: _settings_text(one, without) for label, one in self.experiments.items()}
            yield f"Rows: {'; '.join(f'{label} is {text}' for label, text in texts.items() if text != label)}."

    def about_seeds(self) -> str:
        """What ± means."""
        seeds = [run.seed for run in next(iter(self.runs.values()))]
        if len(seeds) > 1:
            return f"±: standard deviation over {len(seeds)} seeds ({seeds[0]} to {seeds[-1]})."
        return f"One seed ({seeds[0]}): other seeds may have other results."

    def about_training(self) -> Iterator[str]:
        """Notes about training that differs between rows."""
        if self.equal_steps:
            rounds = ", ".join(f"{row.label} {row.rounds}" for row in self.rows)
            taken = sorted(row.steps or 0 for row in self.rows)
            yield f"Equal steps: {taken[0]:,.0f} to {taken[-1]:,.0f} gradient steps per client. Rounds: {rounds}."
        for name in TRAINING:
            values = {method: getattr(one, name) for method, one in self.experiments.items()}
            if len(set(values.values())) > 1:
                each = ", ".join(f"{method} {value}" for method, value in values.items())
                yield f"Training differs, {flag_name(name)}: {each}."

    def _about_differences(self) -> Iterator[str]:
        if any(one.why == DIFFERENT_VIEWS for one in self.differences):
            yield SAID_OF_VIEWS
        tested = [one.difference for one in self.differences if one.difference is not None]
        if not tested:
            return
        how = how_tested(self.differences, f"{self.what}s")
        yield f"Differences are per client and seed, {tested[0].pairs} pairs. {how}"
        remedy = "" if self.equal_steps else " --equal-steps gives every row the same number."
        yield from note_steps(self.differences, self.baseline, remedy)
        seeds = len(next(iter(self.runs.values())))
        if seeds < ENOUGH_SEEDS:
            yield note_few_seeds(seeds)

    def about_warnings(self) -> Iterator[str]:
        """The warnings of all runs, each once."""
        by_text: dict[str, list[str]] = {}
        for label, run in ((label, run) for label, runs in self.runs.items() for run in runs):
            for text in run.result["warnings"]:
                by_text.setdefault(text, []).append(f"{label}-{run.seed}")
        for text, names in by_text.items():
            yield f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {text}"

    def table(self) -> None:
        from pluribus.study.board import print_comparison

        print_comparison(self)

    def __repr__(self) -> str:
        rows = (f"{row.label:{max(map(len, self.runs))}}  {row.scores['mean']}" for row in self.rows)
        return "\n".join([f"Comparison of {self._about}, mean test {self.metric.text}", *rows])

    def _repr_html_(self) -> str:
        """The table of the metric, the differences and the notes, for notebooks."""
        shown = [self._scores(), *([differences_table(self.baseline, self.differences)] if self.differences else [])]
        return html_of(shown, [*self._about_results(), *self._about_runs()], self.cautions)

    @property
    def _about(self) -> str:
        seeds = len(next(iter(self.runs.values())))
        counts = [(len(self.runs), self.what), (seeds, "seed")]
        return " over ".join(f"{number} {word}{'s' if number > 1 else ''}" for number, word in counts)

    def frame(self, rounds: bool = False) -> Any:
        """Tidy rows: label, seed, round, client, view, split, metric and value.

        They are of the round that each client selects, or of every evaluated round. The frame is a pandas DataFrame,
        or a list of dicts if pandas is not installed.
        """
        return make_frame(list(tidy(self.runs, rounds)))

    def plot(self, path: str | Path | None = None, ax: Axes | None = None) -> Axes:
        """Draw the mean test metric over rounds with a band of one standard deviation over seeds. Needs matplotlib."""
        axes = draw_rounds(self.runs, ax)
        if path is not None:
            save(axes, path)
        return axes

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The tables in Markdown, also written to a file if there is a path."""
        return write_to(path, markdown_of(self.tables, self.notes, self.cautions))

    def to_latex(self, path: str | Path | None = None) -> str:
        """The tables for LaTeX with the package booktabs, also written to a file. The notes are comments."""
        return write_to(path, latex_of(self.tables, self.notes, self.cautions))

    def to_csv(self, path: str | Path | None = None) -> str:
        """One line per row with all metrics, unrounded, also written to a file if there is a path."""
        return write_to(path, csv_of(self.lines(self.differences)))

    def lines(self, differences: Sequence[Compared]) -> list[dict[str, Any]]:
        """All metrics of each row by name, and its difference from the baseline."""
        against = {one.label: one for one in differences}
        views = dict.fromkeys(view for row in self.rows for view in row.by_view)
        return [_flat(row, views, against.get(row.label)) for row in self.rows]

    def to_json(self, differences: Sequence[Compared] | None = None) -> dict[str, Any]:
        """Plain values. `differences` replace those that are corrected for this comparison alone."""
        one = next(iter(self.experiments.values()))
        shown = self.differences if differences is None else differences
        return {
            "labels": list(self.runs),
            "methods": [one.method for one in self.experiments.values()],
            "seeds": [run.seed for run in next(iter(self.runs.values()))],
            "data": one.data_name,
            "clients": one.clients,
            "rounds": min(row.rounds for row in self.rows),
            "equal_steps": self.equal_steps,
            "metric": self.metric.name,
            "view": self.view,
            "baseline": self.baseline,
            "target": self.target,
            "overruled": {label: dict(settings) for label, settings in self.overruled.items()},
            "rows": [asdict(row) for row in self.rows],
            "differences": [self._difference_to_json(one) for one in shown],
            "training": {m: {name: getattr(e, name) for name in TRAINING} for m, e in self.experiments.items()},
            "hyper": {m: hyperparameters(e.build_method()) for m, e in self.experiments.items()},
            "cautions": self.cautions,
            "notes": self.notes,
            "folder": _text(self.folder),
            "runs": {label: [_text(run.folder) for run in runs] for label, runs in self.runs.items()},
            "torch": torch.__version__,
        }

    def _difference_to_json(self, one: Compared) -> dict[str, Any]:
        return {"label": one.label, "method": self.experiments[one.label].method, **one.to_json()}


def _spreads(runs: Sequence[Run]) -> dict[str, Spread]:
    """The metric of a method over clients. What some runs lack is left out, but for the columns of the table."""
    found = [run.scores for run in runs]
    others = [name for name in OVER_CLIENTS if name not in COLUMNS and all(one.get(name) is not None for one in found)]
    return {name: Spread.of([one[name] for one in found]) for name in (*COLUMNS, *others)}


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _format(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _rounds(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _settings_text(described: Experiment, without: Container[str]) -> str:
    """A method, and its hyper-parameters that are not the defaults."""
    usual = hyperparameters(find(described.method)())
    found = hyperparameters(described.build_method())
    return ", ".join([described.method, *(f"{k}={v}" for k, v in found.items() if v != usual[k] and k not in without)])


def _text(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)


def _flat(row: Standing, views: Iterable[str], against: Compared | None) -> dict[str, Any]:
    metrics = asdict(row)
    spreads, by_view = metrics.pop("scores"), metrics.pop("by_view")
    flat = {name: metrics.pop(name) for name in ("label", "method")}
    for name, spread in {**spreads, **{view: by_view.get(view) for view in views}}.items():
        flat |= {name: spread and spread["mean"], f"{name}_std": spread and spread["std"]}
    flat |= metrics
    values = against.to_json() if against else dict.fromkeys(Compared("", None, None).to_json())
    del values["steps"]  # the row has them
    own = ("p_holm", "verdict", "steps_of_baseline", "unequal_steps")
    return flat | {name if name in own else f"difference_{name}": value for name, value in values.items()}

"""The metric of clients: each of them, their distribution, and how fair a method is to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pluribus.experiment import SETTINGS
from pluribus.internal.tables import Cell, Table, cells
from pluribus.internal.views import views_text
from pluribus.report.groups import Group, all_runs, differing, seeds_text, settings_of, what_names
from pluribus.report.numbers import Run, metrics_text, selection_of
from pluribus.report.plots.series import Plot, Section, Series, make_series
from pluribus.study.standings import Spread

SPREAD = 0.4  # share of a row, over which the series of a row are spread
MOST_CLIENTS = 100  # in the plot of the metric per client
MOST_NAMED = 4  # groups in a sentence
MOST_PARTITIONS = 12  # plots of clients or of their data

FAIRNESS = {
    "mean": "mean",
    "worst": "worst",
    "worst_decile": "worst decile",
    "best": "best",
    "deviation": "deviation",
}

Member = tuple[Group, Run]
T = TypeVar("T")


def on_same_data(groups: Sequence[Group]) -> dict[str, list[Member]]:
    """Runs whose clients hold the same rows, under a name: settings of the data and the seed, or their own names."""
    found: dict[str, list[Member]] = {}
    for group in groups:
        for run in group.runs:
            found.setdefault(run.partition, []).append((group, run))
    members = list(found.values())
    varied = [name for name in differing([group.first.experiment for group in groups]) if name in SETTINGS["data"]]
    names = [_name_data(some, varied) for some in members]
    if not seeds_text(groups) or len({*names}) < len(names):
        names = [", ".join(run.name for _, run in some) for some in members]
    return dict(list(zip(names, members, strict=True))[:MOST_PARTITIONS])


def _name_data(members: Sequence[Member], varied: Sequence[str]) -> str:
    """The seeds of some runs, and the settings of their data that differ from those of others."""
    settings = settings_of(members[0][1].experiment)
    seeds = " and ".join(_unique(str(run.experiment.seed) for _, run in members))
    return ", ".join([*(f"{name}={settings[name]}" for name in varied), f"seed {seeds}"])


def about_partitions(groups: Sequence[Group]) -> str:
    """Say that some partitions are not shown, after another sentence."""
    count = len({run.partition for run in all_runs(groups)})
    return f" The first {MOST_PARTITIONS} of {count} partitions are shown." if count > MOST_PARTITIONS else ""


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def aside(place: int, count: int) -> float:
    """The distance of a series from the middle of its row. Without it, equal values hide each other."""
    return SPREAD * (place / (count - 1) - 0.5) if count > 1 else 0.0


# ---- each client -----------------------------------------------------------------------------------------------------


def per_client(groups: Sequence[Group]) -> Section:
    """The metric of every client, worst first."""
    runs = all_runs(groups)
    known = {name: [(g, run) for g, run in some if test_values(run)] for name, some in on_same_data(groups).items()}
    plots = [_clients(name, some) for name, some in known.items() if some]
    worst = "; ".join(text for group in groups[:MOST_NAMED] if (text := _worst(group)))
    says = (
        f"Test {metrics_text(runs)} of each client, {selection_of(runs)}, sorted by the first run, with the worst "
        f"client at the top. A client is labeled with its number, and with its model if that is the same in all runs. "
        f"The worst: {worst}.{about_partitions(groups)}"
    )
    return Section("clients", "Clients", says, plots, "No client has been evaluated yet.")


def _worst(group: Group) -> str:
    """The worst client of all seeds, in words."""
    firsts = [(value, run, k) for run in group.runs for k, value in list(test_values(run).items())[:1]]
    if not firsts:
        return ""
    value, run, k = (max if group.first.metric.smaller else min)(firsts, key=lambda one: one[0])
    return f"client {run.client(k)} with {value:.3f} ({run.name})"


def test_values(run: Run) -> dict[int, float]:
    """The test metric by client, worst first."""
    known = {k: value for k, one in run.chosen.items() if (value := one.selected.get("test")) is not None}
    return dict(sorted(known.items(), key=lambda pair: pair[1], reverse=run.metric.smaller))


def _clients(name: str, members: Sequence[Member]) -> Plot:
    order = _unique(k for _, run in members for k in test_values(run))[:MOST_CLIENTS]
    position = {k: at for at, k in enumerate(order)}
    series = []
    for place, (group, run) in enumerate(members):
        points = [
            (
                value,
                position[k] + aside(place, len(members)),
                f"{run.name}, client {run.client(k)}: {value:.3f}{_holds(run, k)}",
            )
            for k, value in test_values(run).items()
            if k in position
        ]
        label = group.name if len({one.name for one, _ in members}) == len(members) else run.name
        series.append(make_series(label, points, group.color, "dots"))
    metric = metrics_text(run for _, run in members)
    return Plot(name, f"test {metric}", "client", series, y_names=[client_label(members, k) for k in order])


def client_label(members: Sequence[Member], k: int) -> str:
    """Number and model of a client, or its number alone if it has another model in another run."""
    labels = {run.client(k) for _, run in members}
    return labels.pop() if len(labels) == 1 else str(k)


def _holds(run: Run, k: int) -> str:
    if k >= len(run.counts):
        return ""
    names = [run.class_name(number) for number, count in enumerate(run.counts[k]) if count]
    return f", holds {', '.join(names)}" if len(names) <= 5 else f", holds {len(names)} classes"


# ---- all clients -----------------------------------------------------------------------------------------------------


def distribution(groups: Sequence[Group]) -> Section:
    """The empirical distribution function of the metric over clients and seeds."""
    runs, seeds = all_runs(groups), seeds_text(groups)
    lines = [line for group in groups if (line := _cumulate(group))]
    metric, whose = metrics_text(runs), "clients of all seeds" if seeds else "clients"
    says = (
        f"The share of {whose} whose test {metric}, {selection_of(runs)}, is at most the value on the axis. A line "
        f"further to the {'left' if runs[0].metric.smaller else 'right'} is better for more clients, and a steep line "
        "treats clients alike."
    )
    plots = [Plot("distribution", f"test {metric}", "share of clients", lines)] if lines else []
    return Section("distribution", "Distribution over clients", says, plots, "")


def _cumulate(group: Group) -> Series | None:
    """Steps from 0 to 1, one at each value."""
    values = sorted(value for run in group.runs for value in test_values(run).values())
    if not values:
        return None
    at_most = {value: number / len(values) for number, value in enumerate(values, 1)}  # the last of equal ones counts
    xs, ys = [values[0], *at_most], [0.0, *at_most.values()]
    text = [f"{group.name}: {100 * y:.3g} % of {len(values)} have at most {x:.4g}" for x, y in zip(xs, ys, strict=True)]
    return Series(group.name, xs, ys, group.color, "steps", text)


def fairness(groups: Sequence[Group]) -> Section:
    """How well a method serves the clients that it serves worst, and how much clients differ."""
    known = [group for group in groups if all(run.score["mean"] is not None for run in group.runs)]
    runs, seeds = all_runs(known), seeds_text(known)
    if not known:
        return Section("fairness", "Fairness", "", [], "")
    when = views_text({group.name: group.first.view for group in known})
    says = (
        f"Test {metrics_text(runs)} over clients, {selection_of(runs)}, {when}. The worst decile is the mean of the "
        "worst tenth of the clients, at least one. The deviation is the standard deviation over clients: 0 if all "
        f"clients are served alike.{f' Numbers are means over {seeds}, ± one standard deviation.' if seeds else ''}"
    )
    rows = [{over: Spread.of([run.score[over] or 0.0 for run in group.runs]) for over in FAIRNESS} for group in known]
    one_view = len({run.view for run in runs}) == len({run.metric for run in runs}) == 1
    best: dict[str, Callable[[Sequence[float]], float | None]] = dict.fromkeys(FAIRNESS, runs[0].metric.best)
    best["deviation"] = min
    columns = []
    for over in FAIRNESS:
        means = [row[over].mean for row in rows]
        winner = best[over](means) if one_view and len(known) > 1 else None
        columns.append(cells([str(row[over]) for row in rows], means, winner))
    names = [Cell(group.name) for group in known]
    table = Table((what_names(groups), *FAIRNESS.values()), list(zip(names, *columns, strict=True)))
    return Section("fairness", "Fairness", says, [], "", [table])

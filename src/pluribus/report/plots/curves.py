"""Numbers against rounds, bytes and seconds: a line per group, the mean over its seeds, with a band."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pluribus.evaluate import evaluated_clients
from pluribus.internal.views import views_text
from pluribus.report.groups import Group, all_runs, seeds_text
from pluribus.report.numbers import Run, metrics_text
from pluribus.report.plots.series import Plot, Section, Series

FEW = 3  # with up to so many groups of one seed, a plot shows means and worst clients

Record = dict[str, Any]
Axis = Callable[[Run], Sequence[float]]
Value = Callable[[Record], float | None]

OVER = ("mean", "worst")
AXES: dict[str, tuple[str, Axis]] = {
    "rounds": ("round", lambda run: [record["round"] + 1 for record in run.history]),
    "bytes": ("bytes up and down so far", lambda run: run.cumulate(lambda one: sum(one["bytes"].values()))),
    "seconds": ("seconds in rounds so far", lambda run: run.cumulate(lambda one: one["seconds"])),
}


def headline(groups: Sequence[Group]) -> Section:
    """The test metric against rounds, bytes and seconds."""
    seeds = seeds_text(groups)
    few = len(groups) <= FEW and not seeds
    shown: list[tuple[str, str, tuple[str, ...]]] = [(axis, axis, OVER if few else ("mean",)) for axis in AXES]
    shown += [] if few else [("worst client", "rounds", ("worst",))]
    plots = [_curves(groups, *one) for one in shown]
    plots[2:2] = _without_zero(plots[1])
    whose = evaluated_clients(run.history for run in all_runs(groups) if run.history)
    lines = f"Lines are the mean over {whose}."
    if few:
        lines = f"Solid lines are the mean over {whose}, dotted lines are the worst client of each round."
    click = "Click a name below the plot to hide or show its line."
    metric, when = metrics_text(all_runs(groups)), views_text({group.name: group.first.view for group in groups})
    says = f"Test {metric} {when}, each client on its own test data. {lines}{about_band(groups)} {click}"
    drawn, title = [plot for plot in plots if plot.series], f"{metric[0].upper()}{metric[1:]}"
    # the key is in links and names of files, so it is the same for all metrics
    return Section("accuracy", title, says, drawn, "No round has been evaluated yet.")


def about_band(groups: Sequence[Group]) -> str:
    """Say what lines and bands are over seeds, after another sentence. Empty if all groups have one seed."""
    seeds = seeds_text(groups)
    if not seeds:
        return ""
    return (
        f" Each line is the mean over {seeds}, and its band is one standard deviation over them, in the rounds that "
        "were evaluated with every seed."
    )


def _curves(groups: Sequence[Group], name: str, axis: str, over: Sequence[str]) -> Plot:
    title, of = AXES[axis]
    lines = [line for group in groups for one in over for line in _curve(group, of, one)]
    return Plot(name, title, f"test {metrics_text(all_runs(groups))}", lines, bytes="x" if axis == "bytes" else "")


def _without_zero(plot: Plot) -> list[Plot]:
    """The plot against bytes on a logarithmic axis, which has no place for groups that send nothing."""
    sent = [one for one in plot.series if all(one.x)]
    silent = [one.name for one in plot.series if one not in sent and not one.faint]
    says = f"A logarithmic axis has no zero, so what sends nothing is missing: {', '.join(silent)}." if silent else ""
    return [Plot("bytes (log)", plot.x, plot.y, sent, bytes="x", log="x", says=says)]


def _curve(group: Group, axis: Axis, over: str) -> Iterator[Series]:
    name = group.name if over == "mean" else f"{group.name}, worst client"
    return line_of(group, name, axis, lambda run: lambda one: mean_of(one, run.view, "test", over), over == "worst")


def mean_of(record: Record, view: str, metric: str, over: str = "mean") -> float | None:
    """A metric over clients in a round, if it was evaluated."""
    return record["mean"].get(view, {}).get(metric, {}).get(over)  # type: ignore[no-any-return]


def line_of(group: Group, name: str, axis: Axis, of: Callable[[Run], Value], faint: bool = False) -> Iterator[Series]:
    """A line through the rounds that have a value in all runs, if there is any. With several seeds it has a band."""
    runs = [_points(run, axis, of(run)) for run in group.runs]
    rounds = [t for t in runs[0] if all(t in points for points in runs)]
    if not rounds:
        return
    values = [[points[t][1] for points in runs] for t in rounds]
    xs, ys = [statistics.fmean(points[t][0] for points in runs) for t in rounds], list(map(statistics.fmean, values))
    if len(runs) == 1:
        text = [f"{name}: {y:.4g} in round {t + 1}" for t, y in zip(rounds, ys, strict=True)]
        yield Series(name, xs, ys, group.color, "line", text, faint=faint)
        return
    spreads = list(map(statistics.stdev, values))
    band = [(y - spread, y + spread) for y, spread in zip(ys, spreads, strict=True)]
    texts = [
        f"{name}: {y:.4g} ± {spread:.2g} in round {t + 1}, {len(runs)} seeds"
        for t, y, spread in zip(rounds, ys, spreads, strict=True)
    ]
    low, high = [low for low, _ in band], [high for _, high in band]
    yield Series(name, xs, ys, group.color, "line", texts, faint=faint, low=low, high=high)


def _points(run: Run, axis: Axis, of: Value) -> dict[int, tuple[float, float]]:
    """By round, the position on the axis and the value."""
    rounds = zip(axis(run), run.history, strict=True)
    return {one["round"]: (x, y) for x, one in rounds if (y := of(one)) is not None}


def losses(groups: Sequence[Group]) -> Section:
    """The loss of the original task against rounds."""
    shown: dict[str, Callable[[Run], Value]] = {
        "test loss": lambda run: lambda one: mean_of(one, run.view, "test_loss"),
        "training loss": lambda run: lambda one: one["loss"],
    }
    says = (
        "The test loss is the loss of the task itself on each client's own test data, mean over clients: the "
        "cross-entropy, or the distance of numbers. The training loss includes all terms that the method adds, so it "
        f"compares runs of one method only.{about_band(groups)}"
    )
    plots = [_against_rounds(groups, name, of) for name, of in shown.items()]
    return Section("loss", "Loss", says, [plot for plot in plots if plot.series], "No loss has been recorded yet.")


def _against_rounds(groups: Sequence[Group], name: str, of: Callable[[Run], Value]) -> Plot:
    title, axis = AXES["rounds"]
    lines = [one for group in groups for one in line_of(group, group.name, axis, of)]
    return Plot(name, title, name, lines)


def notes(groups: Sequence[Group]) -> Section:
    """Numbers that the server of a method records in each round."""

    def noted(name: str) -> Callable[[Run], Value]:
        return lambda run: lambda one: plain(one["notes"].get(name))

    records = [record for run in all_runs(groups) for record in run.history]
    noticed = [pair for record in records for pair in record["notes"].items()]
    names = dict.fromkeys(str(name) for name, value in noticed if plain(value) is not None)
    plots = [_against_rounds(groups, name, noted(name)) for name in names]
    says = "Numbers that the server of a method records in each round. The documentation of the method explains them."
    return Section("notes", "Notes of the server", f"{says}{about_band(groups)}", plots, "")


def plain(value: Any) -> float | None:
    """A value if it is a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

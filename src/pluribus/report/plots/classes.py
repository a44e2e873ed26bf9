"""Classes: which client holds which, how well each is recognized, and what it is taken for."""

from __future__ import annotations

from collections.abc import Sequence

from pluribus.internal.views import views_text
from pluribus.report.groups import Group, seeds_text
from pluribus.report.numbers import Run
from pluribus.report.plots.clients import Member, about_partitions, aside, on_same_data
from pluribus.report.plots.series import Plot, Section, Series, make_series

Counts = list[list[int]]  # test rows by true and predicted class


def confusion(groups: Sequence[Group]) -> Section:
    """How often each class was predicted for rows of each class, and how often rightly."""
    known = {group.name: (group, counts) for group in groups if (counts := add_up(group.runs))}
    by_class = [_by_class(list(known.values()))] if known else []
    plots = [*by_class, *(_matrix(group, counts) for group, counts in known.values())]
    views = views_text({name: group.first.views[0] for name, (group, _) in known.items()})
    seeds = " and seeds" if seeds_text(group for group, _ in known.values()) else ""
    says = (
        f"Test predictions of the selected models {views}, of all clients{seeds} together. The accuracy of a class is "
        "the share of its rows for which it is predicted. In a matrix, the color of a cell is the share of the rows of "
        "a true class for which a class was predicted, and the number counts them. On the diagonal, the two are the "
        "same."
    )
    return Section("confusion", "Classes and confusion", says, plots, "")


def add_up(runs: Sequence[Run]) -> Counts:
    """The confusion matrices of several seeds together. Empty if a run has none, or one of other classes."""
    sizes = {len(run.confusion) for run in runs}
    if len(sizes) > 1 or not sizes.pop():
        return []
    return [
        [sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*(run.confusion for run in runs), strict=True)
    ]


def _matrix(group: Group, counts: Counts) -> Plot:
    names = [group.first.class_name(number) for number in range(len(counts))]
    shares = [[count / (sum(row) or 1) for count in row] for row in counts]
    marks = [[str(count) for count in row] for row in counts]
    places = list(range(len(counts)))
    heat = Series("share of rows", places, places, 0, "heat", cells=shares, marks=marks)
    return Plot(group.name, "predicted class", "true class", [heat], names, names)


def _by_class(known: Sequence[tuple[Group, Counts]]) -> Plot:
    classes = max(len(counts) for _, counts in known)
    series = []
    for place, (group, counts) in enumerate(known):
        points = [
            (
                row[number] / sum(row),
                number + aside(place, len(known)),
                f"{group.name}, class {group.first.class_name(number)}: {row[number]} of {sum(row)} rows",
            )
            for number, row in enumerate(counts)
            if sum(row)
        ]
        series.append(make_series(group.name, points, group.color, "dots"))
    named = max((group.first for group, _ in known), key=lambda run: len(run.classes))
    names = [named.class_name(number) for number in range(classes)]
    return Plot("by class", "accuracy of the class", "class", series, y_names=names)


def partition(groups: Sequence[Group]) -> Section:
    """Rows of each class at each client, as circles."""
    plots = [_bubbles(name, some) for name, some in on_same_data(groups).items() if some[0][1].counts]
    says = (
        "Classes of each client. The area of a circle is the number of rows of a class that a client holds."
        f"{about_partitions(groups)}"
    )
    missing = "The partition is unknown: partition.json is missing, as in a federation of real sites, or it is damaged."
    return Section("partition", "Data of each client", says, plots, missing)


def _bubbles(name: str, members: Sequence[Member]) -> Plot:
    run = members[0][1]
    held = [(k, c, count) for k, row in enumerate(run.counts) for c, count in enumerate(row) if count]
    text = [f"client {k}: {count} rows of class {run.class_name(c)}" for k, c, count in held]
    xs, ys, sizes = [k for k, _, _ in held], [c for _, c, _ in held], [float(count) for _, _, count in held]
    classes = [run.class_name(number) for number in range(max(map(len, run.counts)))]
    dots = Series("rows", xs, ys, 0, "dots", text, sizes)
    return Plot(name, "client", "class", [dots], [str(k) for k in range(len(run.counts))], classes)

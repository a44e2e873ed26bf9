"""How soon each method reaches a target."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pluribus.internal.tables import Cell, Table
from pluribus.internal.views import views_text
from pluribus.report.groups import Group, all_runs, seeds_text, what_names
from pluribus.report.numbers import metrics_text
from pluribus.report.plots.curves import AXES, line_of, mean_of
from pluribus.report.plots.series import Section
from pluribus.study.standings import reach
from pluribus.terminal import format_bytes

SHARES = (0.5, 0.8, 0.9, 0.95)  # of the way from the first evaluated round to the best one


def targets(groups: Sequence[Group]) -> Section:
    """Rounds and bytes until the mean test metric reaches shares of what the best method reaches."""
    means = {group.name: _means(group) for group in groups}
    known = [group for group in groups if means[group.name]]
    runs = all_runs(known)
    if not known or len({run.metric for run in runs}) > 1:
        return Section("targets", "Rounds to a target", "", [], "")
    metric = runs[0].metric
    start = (max if metric.smaller else min)(means[group.name][0] for group in known)
    best = metric.best(value for group in known for value in means[group.name])
    assert best is not None, "every known group has a mean"
    wanted = [start + share * (best - start) for share in SHARES]
    seeds, when = seeds_text(known), views_text({group.name: group.first.view for group in known})
    columns = [column for target in wanted for column in (f"rounds to {target:.3f}", "bytes")]
    table = Table((what_names(groups), *columns), [[Cell(group.name), *_row(group, wanted)] for group in known])
    says = (
        f"Rounds and bytes, up and down, until the test {metrics_text(runs)} (mean over clients, {when}) first reaches "
        f"a target. The targets are {', '.join(f'{100 * share:g} %' for share in SHARES)} of the way from the worst "
        f"first evaluated round ({start:.3f}) to the best round of all ({best:.3f}). They come from these same curves, "
        "so they describe speed and test nothing."
    )
    if seeds:
        says += f" Numbers are means over {seeds}. If only some seeds reach a target, the table says how many."
    return Section("targets", "Rounds to a target", says, [], "", [table] if best != start else [])


def _means(group: Group) -> list[float]:
    """The mean over seeds in each round that was evaluated with all of them."""
    _, rounds = AXES["rounds"]
    lines = line_of(group, "", rounds, lambda run: lambda one: mean_of(one, run.view, "test"))
    return [y for line in lines for y in line.y if y is not None]


def _row(group: Group, wanted: Sequence[float]) -> list[Cell]:
    found = []
    for target in wanted:
        each = [
            reach(run.history, lambda one, view=run.view: mean_of(one, view, "test"), run.metric, target)  # type: ignore[misc]
            for run in group.runs
        ]
        reached = [one for one in each if one is not None]
        if len(reached) < len(each):
            found += [Cell(f"{len(reached)} of {len(each)} seeds" if reached else "never"), Cell("-")]
            continue
        rounds, traffic = (statistics.fmean(one[part] for one in reached) for part in (0, 1))
        found += [Cell(f"{rounds:.1f}".removesuffix(".0")), Cell(format_bytes(traffic))]
    return found

"""The comparison of a report's methods: what `pluribus compare` prints for the same runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from pluribus.errors import MismatchError, MissingDataError, PluribusError
from pluribus.experiment import SETTINGS, TRAINING
from pluribus.report.groups import Group, all_runs, differing
from pluribus.report.numbers import DAMAGE, Run
from pluribus.report.plan import find_plan
from pluribus.report.plots.series import Plot, Section, Series
from pluribus.report.searches import search_folder
from pluribus.storage.code import find_code
from pluribus.storage.history import read_summary
from pluribus.study import standings
from pluribus.study.standings import Comparison

BASELINE = "local"  # where the runs belong to no comparison that has chosen another


def comparison(groups: Sequence[Group], view: str) -> Section:
    """The tables of a comparison in a view, or why these runs are none. Of one group, nothing."""
    key, title = "comparison", "Comparison"
    if len(groups) < 2:
        return Section(key, title, "", [], "")
    try:
        found = compare_groups(groups, view)
        tables, notes = found.tables, [*_about_runs(groups), *found.cautions, *found.notes]
    except PluribusError as error:
        return Section(key, title, "", [], f"These runs are not tested against each other: {error.sentence}")
    except DAMAGE as error:
        return Section(key, title, "", [], f"These runs are not tested against each other: a file is damaged, {error}.")
    says = (
        "The tables of pluribus compare for these runs. Differences are paired: each is of one client with one seed, "
        f"against {found.baseline} with the same client and seed. The plot shows each with its 95 % interval."
    )
    return Section(key, title, says, _differences(found, groups), "", tables, notes)


def compare_groups(groups: Sequence[Group], view: str) -> Comparison:
    """Compare groups over the seeds that all of them have. Refuse runs that cannot be compared."""
    groups = _with_shared_seeds(groups)
    _check(groups)
    plan, _ = find_plan(all_runs(groups))
    runs = {group.name: tuple(_read(run, view) for run in group.runs) for group in groups}
    target = statistics.fmean(run.scores["mean"] for run in next(iter(runs.values())))
    baseline = BASELINE if BASELINE in runs else next(iter(runs))
    if plan is not None:
        baseline = plan.baseline if plan.baseline in runs else baseline
        target = plan.target if plan.view == view else target
    return Comparison(
        experiments={group.name: group.first.experiment for group in groups},
        runs=runs,
        baseline=baseline,
        target=target,
        parameters={group.name: _count_parameters(group.first) for group in groups},
        folder=None,
        view=view,
        equal_steps=plan is not None and plan.equal_steps,
        overruled={} if plan is None else {name: some for name, some in plan.overruled.items() if name in runs},
    )


def _with_shared_seeds(groups: Sequence[Group]) -> list[Group]:
    seeds = [{run.experiment.seed for run in group.runs} for group in groups]
    shared = set.intersection(*seeds)
    if not shared:
        raise MismatchError("they have no seed in common.")
    return [replace(group, runs=tuple(run for run in group.runs if run.experiment.seed in shared)) for group in groups]


def _check(groups: Sequence[Group]) -> None:
    """Refuse runs whose difference is not one of methods, or that have no result yet."""
    runs = all_runs(groups)
    if searched := next((folder for run in runs if (folder := search_folder(run.path))), None):
        raise MismatchError(
            f"{searched} holds trials of a search. Validation data compares them, and test data must not."
        )
    if waiting := next((run for run in runs if run.state != "finished"), None):
        raise MismatchError(f"{waiting.name} has not finished, it is {waiting.state}.")
    # notes of a comparison look methods up, which imports them; a run whose code is allowed has its parameters
    if foreign := next((run for run in runs if any(find_code(vars(run.experiment))) and not run.parameters), None):
        raise MismatchError(f"{foreign.name} names code that is not allowed or cannot be found here.")
    if len({run.metric for run in runs}) > 1:
        raise MismatchError("their metrics differ.")
    other_data = [name for name in differing([run.experiment for run in runs]) if name in SETTINGS["data"]]
    if other_data:
        raise MismatchError(f"they were run on different data, because they differ in {', '.join(other_data)}.")
    for members in zip(*(group.runs for group in groups), strict=True):
        if other := next((run for run in members if run.partition != members[0].partition), None):
            raise MismatchError(
                f"{members[0].name} and {other.name} were run on different data: their partitions differ."
            )
    if empty := next((run for run in runs if run.score["mean"] is None), None):
        raise MissingDataError(f"no client of {empty.name} has a test value of {empty.metric.name}.")


def _about_runs(groups: Sequence[Group]) -> list[str]:
    """Notes about a damaged plan, seeds that are left out, and settings that a comparison would hold equal."""
    plan, problem = find_plan(all_runs(groups))
    seeds = [{run.experiment.seed for run in group.runs} for group in groups]
    alone = sorted(seeds[0].union(*seeds) - seeds[0].intersection(*seeds))
    free = {"method", *TRAINING, *(name for group in groups for name in group.first.experiment.hyper)}
    names = [name for name in differing([group.first.experiment for group in groups]) if name not in free]
    return [
        *([problem] if problem else []),
        *([f"Seeds that not all have are left out here: {', '.join(map(str, alone))}."] if alone else []),
        *([f"Not only methods and their training differ, but also: {', '.join(names)}."] if names and not plan else []),
    ]


def _read(run: Run, view: str) -> standings.Run:
    summary = read_summary(run.path / "result.json")
    return standings.Run(run.experiment.method, run.experiment.seed, run.path, summary, run.history, view)


def _count_parameters(run: Run) -> float | None:
    """Trainable parameters of a client, mean over clients."""
    clients = sum(row.clients for row in run.parameters)
    return sum(row.clients * row.trainable for row in run.parameters) / clients if clients else None


def _differences(found: Comparison, groups: Sequence[Group]) -> list[Plot]:
    """Each difference with its interval."""
    colors, tested = {group.name: group.color for group in groups}, found.differences
    known = [(one.label, one.difference) for one in tested if one.difference is not None]
    series = [
        Series(
            label,
            [one.mean],
            [row],
            colors[label],
            "dots",
            [f"{label}: {one.mean:+.3f}, interval {one.low:+.3f} to {one.high:+.3f}"],
            low=[one.low],
            high=[one.high],
        )
        for row, (label, one) in enumerate(known)
    ]
    title = f"difference from {found.baseline}"
    return [Plot("differences", title, "", series, y_names=[label for label, _ in known], zero=True)] if series else []

"""The searches of `pluribus tune`: the score of each trial, and how it depends on each searched setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from pluribus.report.groups import Group, all_runs
from pluribus.report.plots.series import Plot, Point, Section, Series, make_series
from pluribus.report.searches import Search, find_searches

Scored = tuple[float, object, str]  # score, value of a setting, text


def tuning(groups: Sequence[Group]) -> Section:
    """Score by trial with the best so far, and score against each searched setting."""
    runs = all_runs(groups)
    searches = {one.path.name: one for one in find_searches(run.path for run in runs)}
    smaller, metric = runs[0].metric.smaller, runs[0].metric.text
    lost = sum(trial.score is None for one in searches.values() for trial in one.trials)
    left_out = f" {lost} trials are not drawn: their training diverged, or a pruner stopped them." if lost else ""
    says = (
        f"Trials of a search. The score is the validation {metric}, mean over clients, each in the round that it "
        f"selects: test data takes no part. The line is the best score so far.{left_out}"
    )
    names = list(dict.fromkeys(name for one in searches.values() for trial in one.trials for name in trial.settings))
    plots = [_by_trial(searches, metric, smaller), *(_by_setting(searches, metric, name) for name in names)]
    problems = [one.problem for one in searches.values() if one.problem]
    return Section("tuning", "Tuning", says, [plot for plot in plots if plot.series], " ".join(problems), [], problems)


def _by_trial(searches: dict[str, Search], metric: str, smaller: bool) -> Plot:
    return Plot("trials", "trial", f"validation {metric}", list(_trials(searches, smaller)))


def _trials(searches: dict[str, Search], smaller: bool) -> Iterator[Series]:
    for color, (label, search) in enumerate(searches.items()):
        scored = [(one.number, one.score, one.settings) for one in search.trials if one.score is not None]
        if not scored:
            continue
        points = [
            (number, score, f"{label}, trial {number}: {score:.4g}, {_words(settings)}")
            for number, score, settings in scored
        ]
        best = list(accumulate((score for _, score, _ in scored), min if smaller else max))
        yield make_series(label, points, color, "dots")
        yield Series(f"{label}, best so far", [number for number, _, _ in scored], best, color, "steps")


def _words(settings: dict[str, object]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    )


def _by_setting(searches: dict[str, Search], metric: str, name: str) -> Plot:
    found = {
        label: [
            (one.score, one.settings[name], f"{label}, trial {one.number}: {one.score:.4g}, {_words(one.settings)}")
            for one in search.trials
            if one.score is not None and name in one.settings
        ]
        for label, search in searches.items()
    }
    values = [value for some in found.values() for _, value, _ in some]
    choices = list(dict.fromkeys(map(str, values))) if any(isinstance(value, str) for value in values) else []
    logarithmic = not choices and all(name in one.logarithmic for one in searches.values() if one.trials)
    series = [
        make_series(label, [_place(one, choices) for one in some], color, "dots")
        for color, (label, some) in enumerate(found.items())
        if some
    ]
    return Plot(name, name, f"validation {metric}", series, x_names=choices, log="x" if logarithmic else "")


def _place(one: Scored, choices: Sequence[str]) -> Point:
    score, value, text = one
    return (choices.index(str(value)) if choices else float(str(value)), score, text)

"""Groups of runs that differ only in the seed, and the names of groups and runs in a report."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pluribus.experiment import SETTINGS, Experiment
from pluribus.report.plan import Plan, find_plan
from pluribus.storage.files import to_json

if TYPE_CHECKING:
    from pluribus.report.numbers import Run

MOST_NAMED = 3  # settings in the name of a group
LACKS = "–"  # for a setting that a method does not have


@dataclass(frozen=True)
class Group:
    """Runs of one method with the same settings, in the order of their seeds."""

    name: str
    color: int
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The run of the first seed, for what all seeds have in common."""
        return self.runs[0]

    @property
    def views(self) -> tuple[str, ...]:
        """Views that all runs with a round have, the method's own first."""
        known = [run for run in self.runs if run.history] or self.runs
        return tuple(view for view in known[0].views if all(view in run.views for run in known)) or known[0].views

    def see(self, view: str) -> Group:
        """The same runs in another view, or in the method's own if it lacks that one."""
        return replace(self, runs=tuple(run.see(view) for run in self.runs))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs together that differ only in the seed. Groups have the order of a comparison, or that of their runs."""
    plan, _ = find_plan(runs)
    alike = _split(runs, _settings_key)
    parts = [part for some in alike for part in (_tell_apart(some) if _has_twins(some) else [some])]
    if plan is not None:
        places = {label: place for place, label in enumerate(plan.labels)}
        parts.sort(key=lambda part: places.get(_label(part), len(places)))
    names = _name_groups(parts, plan)
    return [
        Group(name, color, tuple(sorted(part, key=lambda run: run.experiment.seed)))
        for color, (name, part) in enumerate(zip(names, parts, strict=True))
    ]


def name_runs(runs: Sequence[Run]) -> list[Run]:
    """Give each run a distinct name: that of its group, with the seed if a group has several."""
    groups = group_runs(runs)
    several = any(len(group.runs) > 1 for group in groups)
    names = {
        run.path: f"{group.name}, seed {run.experiment.seed}" if several else group.name
        for group in groups
        for run in group.runs
    }
    return [replace(run, name=names[run.path]) for run in runs]


def all_runs(groups: Iterable[Group]) -> list[Run]:
    """The runs of all groups."""
    return [run for group in groups for run in group.runs]


def what_names(groups: Iterable[Group]) -> str:
    """What the names of groups are: methods, or rows if a name is not that of a method."""
    return "method" if all(group.name == group.first.experiment.method for group in groups) else "row"


def seeds_text(groups: Iterable[Group]) -> str:
    """How many seeds groups have, in words. Empty if all have one."""
    counts = {group.name: len(group.runs) for group in groups}
    if max(counts.values(), default=1) == 1:
        return ""
    if len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} seeds"
    return f"seeds ({', '.join(f'{name} {count}' for name, count in counts.items())})"


# ---- settings --------------------------------------------------------------------------------------------------------


def settings_of(described: Experiment) -> dict[str, str]:
    """Settings and hyper-parameters that decide the metrics, but for the seed, in words."""
    without = ("seed", "hyper", *SETTINGS["execution"])
    values = {name: value for name, value in vars(described).items() if name not in without} | dict(described.hyper)
    return {name: _text(value) for name, value in values.items()}


def differing(some: Sequence[Experiment]) -> list[str]:
    """Names of the settings in which experiments differ."""
    known = list(map(settings_of, some))
    names = dict.fromkeys(name for one in known for name in one)
    return [name for name in names if len({one.get(name) for one in known}) > 1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else str(value)


def _settings_key(run: Run) -> str:
    return to_json(settings_of(run.experiment))


# ---- which runs belong together --------------------------------------------------------------------------------------


def _split(runs: Sequence[Run], key: Callable[[Run], Hashable]) -> list[list[Run]]:
    found: dict[Hashable, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return list(found.values())


def _has_twins(runs: Sequence[Run]) -> bool:
    """Whether two runs have the same seed."""
    return len({run.experiment.seed for run in runs}) < len(runs)


def _tell_apart(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with equal settings and seeds, by their folders."""
    parts = _split(runs, lambda run: (run.path.parent, _label([run])))
    return [[run] for run in runs] if any(map(_has_twins, parts)) else parts


def _label(runs: Sequence[Run]) -> str:
    """The label of a row whose folders are named LABEL-SEED. Empty: they are named otherwise."""
    ends = [(run.path.name, f"-{run.experiment.seed}") for run in runs]
    labels = {name.removesuffix(end) if name.endswith(end) else "" for name, end in ends}
    return labels.pop() if len(labels) == 1 else ""


# ---- names -----------------------------------------------------------------------------------------------------------


def _name_groups(parts: Sequence[Sequence[Run]], plan: Plan | None) -> list[str]:
    """Name groups by the shortest kind of name that is distinct for all. Rows of a comparison keep their labels."""
    methods, labels = [part[0].experiment.method for part in parts], list(map(_label, parts))
    firsts = [part[0].experiment for part in parts]
    kinds = [
        labels if plan is not None and {*labels} <= {*plan.labels} else methods,
        labels if all(labels) else methods,
        *([_name_by_settings(part[0].experiment, firsts, write) for part in parts] for write in (_round, str)),
        [part[0].path.name for part in parts],
    ]
    paths = [str(part[0].path) for part in parts]
    return next((names for names in kinds if len({*names}) == len(parts)), paths)


def _name_by_settings(one: Experiment, others: Sequence[Experiment], write: Callable[[str], str]) -> str:
    """The method, and the settings in which it differs from other experiments with this method."""
    names = differing([other for other in others if other.method == one.method])
    settings = settings_of(one) if len(names) <= MOST_NAMED else {}
    return ", ".join([one.method, *(f"{name}={write(settings.get(name, LACKS))}" for name in names if settings)])


def _round(text: str) -> str:
    """A number with four digits, and any other text as it is."""
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text

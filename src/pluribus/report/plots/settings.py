"""The settings of a report's runs: those that differ, and those that are equal."""

from __future__ import annotations

from collections.abc import Sequence

from pluribus.internal.tables import Cell, Table
from pluribus.report.groups import LACKS, Group, differing, settings_of, what_names
from pluribus.report.plots.series import Section

EQUAL = "Settings that are equal"
LONGEST = 60  # characters of a value in a table


def settings(groups: Sequence[Group]) -> Section:
    """A row per group with the settings in which groups differ, and all others once."""
    known = {group.name: settings_of(group.first.experiment) for group in groups}
    what = what_names(groups)
    names = [name for name in differing([group.first.experiment for group in groups]) if name != what]
    rows = [[Cell(name), *(Cell(_shorten(one.get(column, LACKS))) for column in names)] for name, one in known.items()]
    first = next(iter(known.values()))
    equal = "\n".join(f"{name} = {value}" for name, value in first.items() if name not in (*names, what))
    says = f"Settings that differ, besides the seed. {LACKS} stands for a setting that a method does not have."
    tables = [Table((what, *names), rows)] if names else []
    return Section("settings", "Settings that differ", says, [], "", tables, folded={EQUAL: equal})


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"

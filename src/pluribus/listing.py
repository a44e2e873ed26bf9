"""What there is: methods, models, groups, data sets and partitions, a row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def _methods() -> list[Row]:
    from pluribus.method import methods

    return [
        {
            "name": name,
            "about": (cls.__doc__ or "").strip().splitlines()[0],
            "up": cls.up,
            "down": cls.down,
            "needs": ", ".join(sorted(need.value for need in cls.needs)) or "nothing",
            "paper": cls.paper,
        }
        for name, cls in methods().items()
    ]


def _models() -> list[Row]:
    from pluribus.models import entries

    return [{"name": name, "about": entry.about} for name, entry in entries().items()]


def _groups() -> list[Row]:
    from pluribus.models import GROUPS

    return [
        {"name": name, "about": group.about, "width": group.width or "own", "models": ", ".join(group.models)}
        for name, group in GROUPS.items()
    ]


def _data() -> list[Row]:
    from pluribus.data import entries

    return [{"name": name, "about": entry.about} for name, entry in entries().items()]


def _partitions() -> list[Row]:
    from pluribus.data import PARTITIONS

    return [{"name": name, "about": entry.about} for name, entry in PARTITIONS.items()]


LISTS: dict[str, Callable[[], list[Row]]] = {
    "methods": _methods,
    "models": _models,
    "groups": _groups,
    "data": _data,
    "partitions": _partitions,
}


def print_list(rows: list[Row]) -> None:
    """Print rows as a table."""
    table = Table(box=None, header_style="bold")
    for column in rows[0]:
        table.add_column(column, overflow="fold", no_wrap=column == "name")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)

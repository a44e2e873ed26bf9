"""What there is: methods, models, groups, data sets and partitions, a row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
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
    """Print each row as its name and what it is, and the other columns below."""
    console = Console(highlight=False)
    indent = max(len(row["name"]) for row in rows) + 3
    for row in rows:
        more = {key: value for key, value in row.items() if key not in ("name", "about")}
        table = Table.grid(padding=(0, 2))
        table.add_column(width=indent - 2, no_wrap=True)
        table.add_row(f" [bold]{row['name']}[/]", escape(row["about"]))
        if more:
            line = "   ".join(f"[cyan]{key}[/] {escape(str(value))}" for key, value in more.items())
            table.add_row("", f"[dim]{line}[/]")
        console.print(table)

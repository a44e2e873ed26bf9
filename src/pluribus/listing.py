"""Lists of all methods, models, groups, data sets and partitions, one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from pluribus.errors import ConfigError

if TYPE_CHECKING:
    from pluribus.data import Dataset

Row = dict[str, Any]


def method_rows(settings: Mapping[str, Any]) -> list[Row]:
    """One row per registered method, with its traffic on its default task or on the task of the settings."""
    from pluribus.data import load
    from pluribus.method import methods

    load_once = cache(load)  # methods share a few data sets, and some are slow to load
    return [
        {
            "name": name,
            "about": (cls.__doc__ or "").strip().splitlines()[0],
            "up": cls.up,
            "down": cls.down,
            "needs": ", ".join(sorted(need.value for need in cls.needs)) or "nothing",
            "paper": cls.paper,
            **_traffic(name, settings, load_once),
        }
        for name, cls in methods().items()
    ]


def _traffic(method: str, settings: Mapping[str, Any], load: Callable[..., Dataset]) -> Row:
    """Bytes per client and round on that task, or the reason why the method cannot run on it."""
    from pluribus.assembly import assemble, bytes_per_round
    from pluribus.experiment import experiment

    try:
        described = experiment(method, **settings)
        dataset = load(described.data, image_size=described.image_size, seed=described.seed)
        found = bytes_per_round(assemble(described, dataset))
    except ConfigError as error:
        return {"bytes_up": None, "bytes_down": None, "refused": error.sentence}
    return {"bytes_up": round(found.up), "bytes_down": round(found.down), "refused": None}


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

    auto = {"name": "auto", "about": "domain if the data set has domains, otherwise dirichlet"}
    return [*({"name": name, "about": entry.about} for name, entry in PARTITIONS.items()), auto]


LISTS: dict[str, Callable[[], list[Row]]]
LISTS = {"models": _models, "groups": _groups, "data": _data, "partitions": _partitions}


def print_list(rows: list[Row]) -> None:
    """Print the name and description of each row, and the other columns below. Long names get their own line."""
    console = Console(highlight=False)
    widest = max(len(row["name"]) for row in rows)
    beside = widest < console.width / 3
    for row in rows:
        name, about = f" [bold]{row['name']}[/]", escape(row["about"])
        more = {key: value for key, value in row.items() if key not in ("name", "about")}
        line = "   ".join(f"[cyan]{key}[/] {escape(str(value))}" for key, value in more.items())
        table = Table.grid(padding=(0, 2))
        table.add_column(width=widest + 1 if beside else 1, no_wrap=True)
        if beside:
            table.add_row(name, about)
        else:
            console.print(name)
            table.add_row("", about)
        if more:
            table.add_row("", f"[dim]{line}[/]")
        console.print(table)


def print_methods(rows: list[Row], task: str) -> None:
    """Print a table of methods: uploads and downloads, needs, paper and bytes."""
    console = Console(highlight=False)
    methods, keys = Column("method", style="bold", no_wrap=True), Column(style="cyan", no_wrap=True)
    sizes = Column("bytes", justify="right", no_wrap=True)
    table = Table(methods, keys, "uploads, downloads, needs, paper", sizes, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        for key in ("up", "down", "needs", "paper"):
            size = _format_bytes(row[f"bytes_{key}"]) if f"bytes_{key}" in row else ""
            table.add_row(row["name"] if key == "up" else "", key, escape(row[key]), size)
        table.add_row()
    console.print(table)
    console.print(f"Bytes: maximum per client and round, without headers, {escape(task)}.", style="dim")
    if refused := [row for row in rows if row["refused"]]:
        names, reason = ", ".join(row["name"] for row in refused), escape(refused[0]["refused"])
        console.print(f"-: cannot run on this task: {names}. First reason: {reason}", style="dim")


def _format_bytes(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"

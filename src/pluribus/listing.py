"""Lists of all methods, models, groups, data sets and partitions, one row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from pluribus.errors import ConfigError
from pluribus.settings import check_names, convert_fields

if TYPE_CHECKING:
    from pluribus.data import Dataset
    from pluribus.method import Need

    Needs = Need | str | Iterable[Need | str]

Row = dict[str, Any]

TASK = ("data", "models", "rounds", "training")  # groups of settings that describe a task


def list_methods(pattern: str = "*", *, needs: Needs | None = None, **task: Any) -> list[Row]:
    """The methods whose name matches a pattern, such as `"fed*"`, one dict each.

    `needs` keeps the methods that need all of this, such as `Need.PUBLIC_DATA` or `"public-data"`; `"nothing"` keeps
    those without needs. Bytes are the most per client and round, on the method's default task or on the one of these
    settings: `list_methods(data="cifar10", models="htfe8")`. `sources` has the fields that a client sends there, by
    where they come from. `refused` says why a method cannot run on it.
    """
    from pluribus.data import load
    from pluribus.experiment import SETTINGS, Experiment
    from pluribus.method import find, methods

    check_names(task, [name for group in TASK for name in SETTINGS[group]], "setting", "pluribus list methods --help")
    task, wanted = convert_fields(Experiment, task), None if needs is None else _parse_needs(needs)
    load_once = cache(load)  # methods share a few data sets, and some are slow to load
    known = {name: find(name) for name in methods() if _matches(name, pattern)}
    return [
        {
            "name": name,
            "about": (cls.__doc__ or "").strip().partition("\n")[0],
            "family": cls.family,
            "up": cls.up,
            "down": cls.down,
            "needs": ", ".join(sorted(need.value for need in cls.needs)) or "nothing",
            "paper": cls.paper,
            **_traffic(name, task, load_once),
        }
        for name, cls in known.items()
        if wanted is None or (wanted <= cls.needs if wanted else not cls.needs)
    ]


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name.lower(), pattern.lower())


def need_names() -> dict[str, Need]:
    """What methods may need, by name: `public-data` is Need.PUBLIC_DATA."""
    from pluribus.method import Need

    return {need.name.lower().replace("_", "-"): need for need in Need}


def _parse_needs(needs: Needs) -> set[Need]:
    """A need, names with commas between them, or several of these. No need: nothing."""
    from pluribus.method import Need

    if isinstance(needs, Need):
        return {needs}
    if isinstance(needs, str):
        words = [word.strip().lower().replace("_", "-") for word in needs.split(",")]
        check_names(words, [*need_names(), "nothing"], "need", "pluribus list methods --help")
        return {need_names()[word] for word in words if word != "nothing"}
    return {need for one in needs for need in _parse_needs(one)}


def _traffic(method: str, settings: Mapping[str, Any], load: Callable[..., Dataset]) -> Row:
    """What is sent on that task: fields by their source, bytes per client and round. Or why it cannot run on it."""
    from pluribus.assembly import assemble, bytes_per_round
    from pluribus.experiment import experiment
    from pluribus.message import sources_of

    try:
        described = experiment(method, **settings)
        dataset = load(described.data, image_size=described.image_size, seed=described.seed)
        parts = assemble(described, dataset)
        found = bytes_per_round(parts)
    except ConfigError as error:
        return {"sources": None, "bytes_up": None, "bytes_down": None, "refused": error.sentence}
    sources = sources_of(parts.method.wires(parts.task, parts.cards[0]))
    return {"sources": sources, "bytes_up": round(found.up), "bytes_down": round(found.down), "refused": None}


def list_models(pattern: str = "*", *, takes: str | None = None) -> list[Row]:
    """The models whose name matches a pattern, such as `"resnet*"`, one dict each.

    `takes` keeps the models that take rows of this kind: `"image"`, `"signal"`, `"tokens"`, `"table"` or `"tensor"`.
    Parameters are counted for 10 classes, on rows of the size that `on` says; None if the model does not take them.

    >>> [row["name"] for row in list_models("mlp-*")]
    ['mlp-64', 'mlp-128-64']
    >>> list_models("gru*", takes="signal")[0]["parameters"]
    15050
    """
    from pluribus.inputs import KINDS
    from pluribus.models import entries
    from pluribus.models.sizes import size_of, typical_input

    if takes is not None:
        check_names([takes], KINDS, "kind of rows", "pluribus list --help")
    found = {name: entry for name, entry in entries().items() if takes is None or takes in entry.takes}
    return [
        {
            "name": name,
            "about": entry.about,
            "takes": ", ".join(entry.takes),
            "parameters": None if (size := size_of(name)) is None else size.parameters,
            "on": str(typical_input(name)),
        }
        for name, entry in found.items()
        if _matches(name, pattern)
    ]


def list_groups(pattern: str = "*") -> list[Row]:
    """The groups of models whose name matches a pattern, one dict each."""
    from pluribus.models import GROUPS

    return [
        {"name": name, "about": group.about, "width": group.width or "own", "models": ", ".join(group.models)}
        for name, group in GROUPS.items()
        if _matches(name, pattern)
    ]


def list_data(pattern: str = "*") -> list[Row]:
    """The data sets whose name matches a pattern, one dict each."""
    from pluribus.data import entries

    known = entries().items()
    return [{"name": name, "about": one.about, "kind": one.kind} for name, one in known if _matches(name, pattern)]


def list_partitions(pattern: str = "*") -> list[Row]:
    """The partitions whose name matches a pattern, one dict each."""
    from pluribus.data import PARTITIONS

    about = {name: kind.about for name, kind in PARTITIONS.items()}
    about["auto"] = "domain if the data set has domains, otherwise dirichlet"
    return [{"name": name, "about": text} for name, text in about.items() if _matches(name, pattern)]


LISTS: dict[str, Callable[..., list[Row]]]
LISTS = {"models": list_models, "groups": list_groups, "data": list_data, "partitions": list_partitions}


def print_list(rows: list[Row]) -> None:
    """Print the name and description of each row, and the other columns below. Long names get their own line."""
    console = Console(highlight=False)
    widest = max(len(row["name"]) for row in rows)
    beside = widest < console.width / 3
    for row in rows:
        name, about = f" [bold]{row['name']}[/]", escape(row["about"])
        more = {key: value for key, value in row.items() if key not in ("name", "about")}
        line = "   ".join(f"[cyan]{key}[/] {escape(_format(value))}" for key, value in more.items())
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


def _format(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def print_methods(rows: list[Row], task: str) -> None:
    """Print a table of methods: family, uploads and where they come from, downloads, needs, paper and bytes."""
    console = Console(highlight=False)
    methods, keys = Column("method, family", no_wrap=True), Column(style="cyan", no_wrap=True)
    sizes = Column("bytes", justify="right", no_wrap=True)
    about = "uploads, sources, downloads, needs, paper"
    table = Table(methods, keys, about, sizes, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        for key in ("up", "sources", "down", "needs", "paper"):
            text = name_sources(row["sources"]) if key == "sources" else row[key]
            size = _format_bytes(row[f"bytes_{key}"]) if f"bytes_{key}" in row else ""
            beside = {"up": f"[bold]{row['name']}[/]", "sources": f"[dim]{row['family']}[/]"}.get(key, "")
            table.add_row(beside, "from" if key == "sources" else key, escape(text), size)
        table.add_row()
    console.print(table)
    console.print(f"Bytes: maximum per client and round, without headers, {escape(task)}.", style="dim")
    if refused := [row for row in rows if row["refused"]]:
        names, reason = ", ".join(row["name"] for row in refused), escape(refused[0]["refused"])
        console.print(f"-: cannot run on this task: {names}. First reason: {reason}", style="dim")


def name_sources(sources: Mapping[str, Iterable[str]] | None) -> str:
    """Where the uploads of a method come from, in a few words."""
    return "-" if sources is None else ", ".join(sources) or "nothing"


def _format_bytes(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"

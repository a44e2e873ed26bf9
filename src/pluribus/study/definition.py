"""A study: rows, the settings that they share, and axes, which are settings with several values each.

A study is a TOML file, or a dict of the same shape:

title = "Server step of FedGH"
seeds = 5
baseline = "alone"

[settings]              # of all rows: settings of an experiment, and hyper-parameters for the rows that have them
clients = 10

[axes]                  # every combination of their values is a point
alpha = [0.1, 1.0]

[rows.alone]
method = "local"
[rows.client]
method = "fedgh"
settings = {server_step = "client"}
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pluribus.errors import ConflictError, FormatError, UnknownNameError, unknown
from pluribus.experiment import known_settings, read_settings
from pluribus.internal.views import AFTER, View
from pluribus.method import find
from pluribus.settings import check_names, convert_fields, setting, settings_of
from pluribus.storage.toml import read_toml
from pluribus.study.grid import data_label
from pluribus.study.rows import LONGEST, UNSAFE, AnyRows, Row, check_rows, choose_rows, to_rows

LOOK = "pluribus study --help"
OF_RUNS = {"method": "rows", "hyper": "settings", "seed": "seed and seeds of the study", "out": "out of the study"}
"""Settings of an experiment that a study says elsewhere."""


@dataclass(frozen=True)
class Point:
    """One value of every axis."""

    settings: Mapping[str, Any]
    texts: Mapping[str, str]  # the values in words, by axis

    @property
    def label(self) -> str:
        """For people, for example `alpha=0.1, clients=4`. Empty if there is no axis."""
        return ", ".join(f"{name}={text}" for name, text in self.texts.items())

    @property
    def folder(self) -> str:
        """The same as the name of a folder. If it is too long, its end is replaced by a digest."""
        name = _safe(self.label.replace(", ", ","))
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{digest}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Rows, shared settings and axes."""

    rows: tuple[Row, ...]
    title: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all rows. A hyper-parameter is for the rows that have it."""
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Settings with several values each. A hyper-parameter is for the rows that have it."""
    seeds: int = setting(3, at_least=1)
    seed: int = 0
    baseline: str = ""
    """The row that the others are tested against. Default: the first."""
    view: View = AFTER

    def __post_init__(self) -> None:
        for name, value in convert_fields(type(self), vars(self)).items():
            object.__setattr__(self, name, value)
        lists = {name: values.tolist() if hasattr(values, "tolist") else values for name, values in self.axes.items()}
        object.__setattr__(self, "axes", lists)  # arrays and tensors become lists
        if self.baseline and self.baseline not in self.labels:
            known = ", ".join(self.labels)
            raise UnknownNameError(f"--baseline must be one of {known}, not {self.baseline}.")

    @property
    def labels(self) -> list[str]:
        return [row.label for row in self.rows]

    @property
    def points(self) -> list[Point]:
        """Every combination of the axes' values, the last axis fastest. Without axes, one point."""
        texts = {name: _texts(name, values) for name, values in self.axes.items()}
        combinations = itertools.product(*(range(len(values)) for values in self.axes.values()))
        return [
            Point(
                {name: self.axes[name][i] for name, i in zip(self.axes, numbers, strict=True)},
                {name: texts[name][i] for name, i in zip(self.axes, numbers, strict=True)},
            )
            for numbers in combinations
        ]

    def choose(self: S, only: Iterable[str]) -> S:
        """The study with some of its rows, by label in any case. Without labels, all rows."""
        rows = choose_rows(self.rows, only, self.title or "the study", LOOK)
        kept = self.baseline if self.baseline in [row.label for row in rows] else ""
        axes = {name: values for name, values in self.axes.items() if any(_concerns(row, name) for row in rows)}
        return replace(self, rows=rows, baseline=kept, axes=axes)

    def at(self, point: Point) -> tuple[list[Row], dict[str, Any]]:
        """The rows at a point with their hyper-parameters, and the settings of all of them."""
        values = {**self.settings, **point.settings}
        common = {name: value for name, value in values.items() if name in known_settings()}
        rows = []
        for row in self.rows:
            mine = {name: value for name, value in values.items() if name not in common and _concerns(row, name)}
            rows.append(replace(row, settings={**mine, **row.settings}))
        return rows, common

    def axes_of(self, row: Row) -> list[str]:
        """The axes that change a row. Equal values on these axes are the same run."""
        return [name for name in self.axes if _concerns(row, name)]

    def check(self, where: str = "the study") -> None:
        """Refuse rows, settings and axes that cannot be. Values are checked with the experiments."""
        check_rows(self.rows)
        hyper = [name for row in self.rows for name in _hyper_names(row)]
        for kind, names in (("setting", self.settings), ("axis", self.axes)):
            for name in names:
                if name in OF_RUNS:
                    raise ConflictError(f"{name} cannot be a {kind} of {where}: use {OF_RUNS[name]}.")
                if name not in known_settings() and name not in hyper:
                    raise unknown(f"{kind} of {where}", name, [*known_settings(), *hyper], LOOK)
                if not any(_concerns(row, name) for row in self.rows):
                    raise ConflictError(f"{name} changes nothing in {where}: every row sets it itself.")
        for name, values in self.axes.items():
            if isinstance(values, str | Mapping) or not isinstance(values, Sequence) or not values:
                raise FormatError(f"axis {name} of {where} must be a list of values, not {values!r}.")
            if name in self.settings:
                raise ConflictError(f"{name} is both a setting and an axis of {where}. Use one of them.")


S = TypeVar("S", bound=Study)


def _hyper_names(row: Row) -> list[str]:
    cls = find(row.method_name)
    return list(settings_of(cls)) if is_dataclass(cls) else []


def _concerns(row: Row, name: str) -> bool:
    """Whether a shared setting changes a row: it has the setting, and sets no value of its own."""
    return name not in row.settings and (name in known_settings() or name in _hyper_names(row))


def _texts(name: str, values: Sequence[Any]) -> list[str]:
    """The values of an axis in words. If some are equal, or would be as names of folders, all get a number."""
    texts = [data_label(value) if name == "data" else _text(value) for value in values]
    different = len({_safe(text).lower() for text in texts}) == len(texts)
    return texts if different else [f"{text}-{i}" for i, text in enumerate(texts)]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(_text, value))
    if isinstance(value, str | int | float | None):
        return str(value)
    return str(getattr(value, "__name__", type(value).__name__))


def _safe(text: str) -> str:
    return UNSAFE.sub("_", text)


def to_study(source: str | Path | Study | AnyRows | Mapping[str, Any], **changes: Any) -> Study:
    """A study from its file, a dict of the same shape, or rows. `changes` replace fields; None changes nothing."""
    changes = {name: value for name, value in changes.items() if value is not None}
    where = "the study"
    if isinstance(source, Study):
        study = source
    elif _is_file(source):
        where = str(source)
        study = parse_study(read_toml(Path(where)), where)
    elif isinstance(source, Mapping) and isinstance(source.get("rows"), Mapping | list | tuple):
        study = parse_study(source, where)
    else:
        study = Study(rows=tuple(to_rows(source)))  # type: ignore[arg-type]
    if settings := changes.pop("settings", {}):
        axes = {name: values for name, values in study.axes.items() if name not in settings}  # one value instead
        study = replace(study, settings={**study.settings, **settings}, axes=axes)
    study = replace(study, **changes)
    study.check(where)
    return study


def _is_file(source: Any) -> bool:
    return isinstance(source, Path) or (isinstance(source, str) and source.endswith(".toml"))


def parse_study(written: Mapping[str, Any], where: str) -> Study:
    """A study from the content of its file."""
    check_names(written, [one.name for one in fields(Study)], f"key in {where}:", LOOK)
    for name in ("settings", "axes", "rows"):
        if not isinstance(written.get(name, {}), Mapping) and not (name == "rows" and where == "the study"):
            raise FormatError(f"{name} in {where} must be a table: write [{name}] above its lines.")
    values = {**written, "rows": tuple(to_rows(written.get("rows", {})))}
    known = {name: value for name, value in values.get("settings", {}).items() if name in known_settings()}
    values["settings"] = {**values.get("settings", {}), **read_settings(known, where)}
    return Study(**values)

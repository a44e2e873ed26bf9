"""The form of the rows that a federation agrees on, as federation.toml describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pluribus.errors import FormatError, UnknownNameError
from pluribus.inputs import KINDS, Input
from pluribus.sites.agreement import Form
from pluribus.sites.config import FederationFile

NAMES = ("kind", "shape", "vocabulary", "columns", "categories")


def read_form(file: FederationFile) -> Form:
    """The rows that all sites have: images of a shape, or what the table [input] says."""
    if file.input is None:
        return Form(Input("image", tuple(file.image or ())))
    table = file.input
    if unknown := [name for name in table if name not in NAMES]:
        raise UnknownNameError(f"[input] in federation.toml has no '{unknown[0]}': it takes {', '.join(NAMES)}.")
    if table.get("kind") not in KINDS:
        raise FormatError(f"[input] in federation.toml needs 'kind', one of {', '.join(KINDS)}.")
    columns, categories = _read_columns(table)
    facts = {name: table[name] for name in ("kind", "shape", "vocabulary") if name in table}
    if columns and table["kind"] == "table":
        facts["shape"] = table.get("shape", [len(columns)])
    try:
        given = Input.of(facts | {"categories": [len(values) for values in categories]})
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"[input] in federation.toml describes no rows ({error}). It needs 'shape', or 'columns' for a table, and "
            f"for tokens 'vocabulary'."
        ) from error
    if columns and given.shape[0] != len(columns):
        raise FormatError(f"[input] in federation.toml names {len(columns)} columns, but its shape is {given.shape}.")
    return Form(given, columns, categories)


def _read_columns(table: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The columns of a table, numbers first, or the channels of signals; and the values of the categories."""
    columns, values = table.get("columns", []), table.get("categories", {})
    if (columns and table["kind"] not in ("table", "signal")) or (values and table["kind"] != "table"):
        raise FormatError(
            f"[input] in federation.toml has columns or categories, but rows of the kind {table['kind']} have none."
        )
    if not _are_names(columns) or not isinstance(values, dict):
        raise FormatError(
            "[input] in federation.toml needs 'columns' as a list of names, each once, and 'categories' as a table of "
            "lists, such as [input.categories] ward = ['a', 'b']."
        )
    for name, known in values.items():
        if name not in columns or not known or not _are_names(known):
            raise FormatError(
                f"'{name}' in [input.categories] of federation.toml must be one of 'columns', with a list of its "
                f"values, each once."
            )
    numbers = [name for name in columns if name not in values]
    chosen = [name for name in columns if name in values]
    return (*numbers, *chosen), tuple(tuple(values[name]) for name in chosen)


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, str) for v in values) and len(set(values)) == len(values)

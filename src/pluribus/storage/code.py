"""The code that the files of a run name by dotted paths, and whether the user allows it.

Whoever wrote a file chose its names, and importing runs code. So a dotted path in a file is imported only if the user
gave it to this process too, or allows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin, get_type_hints

from torch import nn
from torch.utils.data import Dataset as TorchDataset

from pluribus import models
from pluribus.data import Dataset
from pluribus.data import datasets as data_sets
from pluribus.data.partitions import PARTITIONS
from pluribus.errors import ForeignCodeError, UserCodeError
from pluribus.internal.lookup import import_dotted, is_dotted, is_given
from pluribus.method import methods
from pluribus.models.capacity import architecture_of
from pluribus.models.zoo import is_code

Kind = Literal["method", "data", "partition", "model"]
Allow = bool | Collection[str]  # all code whose declared type is right, or these dotted paths

ADD = "add --allow-code"
DECLARE: dict[Kind, str] = {
    "data": "end its first line with `-> Dataset`",
    "partition": "call its parameters labels, clients and rng",
    "model": "end its first line with `-> nn.Module`",
}


class Named(NamedTuple):
    """Code that a setting names: what it is for, and its dotted path."""

    kind: Kind
    path: str


_given = set[Named]()  # what the user gave to this process


def remember_code(settings: Mapping[str, Any]) -> None:
    """The user gave these settings to this process. A folder that names the same code brings no other."""
    _given.update(find_code(settings))


def check_code(where: Path, settings: Mapping[str, Any], allow: Allow, again: str = ADD) -> None:
    """Refuse code in the settings of a file, unless the user gave it or allows it. `again` says how to allow it."""
    named = [one for one in find_code(settings) if one not in _given and one.path not in _paths(allow)]
    for one in named:
        if allow is not True:
            raise ForeignCodeError(
                f"{where} names code, {one.kind} '{one.path}', which is imported only if you allow it: if you trust "
                f"it, {again}."
            )
        if one.kind != "method":  # the lookup of a method refuses everything but a Method
            _check_declared(where, one)


def how_to_resume(path: Path | None, settings: Mapping[str, Any]) -> str:
    """The command that resumes a run of the user: it names the user's own code again."""
    paths = dict.fromkeys(one.path for one in find_code(settings))
    return f"pluribus resume {path}" + (f" --allow {','.join(paths)}" if paths else "")


def _paths(allow: Allow) -> Collection[str]:
    if isinstance(allow, bool):
        return ()
    return [path.strip() for path in allow.split(",")] if isinstance(allow, str) else allow


def find_code(settings: Mapping[str, Any]) -> Iterator[Named]:
    """The code that settings name. Every hyper-parameter that is a dotted path may be that of a model."""
    method, partition = settings.get("method"), settings.get("partition")
    if isinstance(method, str) and "." in method and method not in methods():
        yield Named("method", method)
    for name in (settings.get("data"), settings.get("public_data")):
        if isinstance(name, str) and data_sets.is_code(name):
            yield Named("data", name)
    if isinstance(partition, str) and "." in partition and partition not in PARTITIONS and not is_given(partition):
        yield Named("partition", partition)
    for text in (*_texts(settings.get("models")), *_texts(settings.get("hyper"))):
        names = (architecture_of(name.strip()) for name in text.split(","))
        yield from (Named("model", name) for name in names if is_code(name) and is_dotted(name))


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of a setting: itself, or those in a list or a table."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


# Declared types -------------------------------------------------------------------------------------------------------


def _check_declared(where: Path, one: Named) -> None:
    """Refuse code that does not say that it is what a setting needs, before it is called."""
    if not _is_declared(one.kind, import_dotted(one.path, one.kind)):
        raise UserCodeError(
            f"{where} names {one.kind} '{one.path}', which does not say that it is one: {DECLARE[one.kind]}, or allow "
            f"this path alone with --allow {one.path}."
        )


def _is_declared(kind: Kind, found: Any) -> bool:
    if kind == "partition":
        return {"labels", "clients", "rng"} <= _parameters(found)
    if kind == "data":
        registered: list[Any] = [entry.load for entry in data_sets.entries().values()]
        return found in registered or _returns(found, (Dataset, TorchDataset))
    registered = [entry.builder for entry in models.entries().values()]
    return found in registered or _returns(found, (nn.Module,))


def _returns(found: Any, wanted: tuple[type, ...]) -> bool:
    """Whether calling it gives one of these types: it is such a class, or a function with such an annotation."""
    if not isinstance(found, type):
        try:
            found = get_type_hints(found).get("return")
        except (NameError, TypeError):  # an annotation that cannot be evaluated, or no function
            return False
        found = get_origin(found) or found
    return isinstance(found, type) and issubclass(found, wanted)


def _parameters(found: Any) -> set[str]:
    try:
        return {*inspect.signature(found).parameters}
    except (TypeError, ValueError):
        return set()

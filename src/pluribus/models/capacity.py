"""The capacity of a client: a share of its model's width, the number of its stages, or the rank of its adapters.

A capacity is part of a model's name: `cnn4@0.5` is cnn4 with half of its channels, `resnet18@depth2` has the first two
stages, `tiny-vit-32@rank4` has adapters of rank 4. Schemas, byte counts, places in memory and recorded steps are per
name, so they follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pluribus.errors import ConflictError, FormatError, MissingSettingError, RangeError

CapacityKind = Literal["width", "depth", "rank"]
IN_WORDS: dict[CapacityKind, str] = {
    "width": "a share of the width, above 0 and at most 1",
    "depth": "a number of stages, at least 1",
    "rank": "a rank, at least 1",
}
_SUFFIX = re.compile(r"(?P<model>.+)@(?P<kind>depth|rank|)(?P<number>[0-9]+(\.[0-9]+)?)", re.DOTALL)


class Capacity(NamedTuple):
    """How much of a model a client has."""

    kind: CapacityKind
    value: float

    def __str__(self) -> str:
        return f"{'' if self.kind == 'width' else self.kind}{self.value:g}"


def split_name(model: str) -> tuple[str, Capacity | None]:
    """The architecture of a model's name, and the capacity in it.

    >>> split_name("cnn4@0.5")
    ('cnn4', Capacity(kind='width', value=0.5))
    >>> split_name("cnn4")
    ('cnn4', None)
    """
    found = _SUFFIX.fullmatch(model)
    if found is None:
        return model, None
    kind = found["kind"] or "width"
    return found["model"], check_capacity(kind, float(found["number"]))  # type: ignore[arg-type]


def architecture_of(model: str) -> str:
    """The name of a model without a capacity."""
    return split_name(model)[0]


def name_capacities(models: Any) -> bool:
    """Whether some of these models, in text or in a list, have a capacity in their name."""
    names = models.split(",") if isinstance(models, str) else models if isinstance(models, Sequence) else ()
    return any(isinstance(one, str) and split_name(one.strip())[1] is not None for one in names)


def name_with(model: str, capacity: Capacity) -> str:
    """The name of a model with a capacity. The whole width needs no mention."""
    return model if capacity == ("width", 1.0) else f"{model}@{capacity}"


def check_capacity(kind: CapacityKind, value: float) -> Capacity:
    """Refuse a capacity that leaves nothing of a model."""
    fits = 0 < value <= 1 if kind == "width" else value >= 1 and value == int(value)
    if not fits:
        raise RangeError(f"a capacity of {value:g} is not {IN_WORDS[kind]}.")
    return Capacity(kind, value)


def write_capacities(given: Any, clients: int) -> str:
    """Capacities as a setting keeps them: numbers with commas. Python may give a number, a list, or one per client."""
    if isinstance(given, Mapping):
        for client in range(clients):
            if client not in given:
                raise MissingSettingError(f"client {client} of {clients} has no capacity. Give one to every client.")
        given = [given[client] for client in range(clients)]
    elif isinstance(given, str):
        given = [part for part in given.split(",") if part.strip()]
    elif not isinstance(given, Sequence):
        given = [given]
    return ",".join(f"{_number(one):g}" for one in given)


def _number(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        raise FormatError(f"capacity '{given}' is not a number. Write, for example, 1,0.5,0.25.") from None


def give_capacities(models: Sequence[str], capacities: str, kind: CapacityKind) -> tuple[str, ...]:
    """The names of clients' models with their capacities: client i gets number i mod length."""
    if not capacities:
        return tuple(models)
    if named := [model for model in models if split_name(model)[1] is not None]:
        raise ConflictError(
            f"--models names a capacity ('{named[0]}'), and --capacity gives one, too: use one of them."
        )
    numbers = [check_capacity(kind, float(one)) for one in capacities.split(",")]
    return tuple(name_with(model, numbers[k % len(numbers)]) for k, model in enumerate(models))

"""The user's own partitions: rows per client, a client per row, and functions, with anything in them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from guard import scratch, survives
from hypothesis import given
from hypothesis import strategies as st
from mutate import documents, fuzzed, scalars, values

from conftest import few_digits
from pluribus.assembly import assemble
from pluribus.data.datasets import load
from pluribus.data.partitions import partition, take_partition
from pluribus.errors import PluribusError
from pluribus.experiment import experiment

ROWS = 40
LABELS = np.arange(ROWS) % 3
PER_CLIENT = [list(range(20)), list(range(20, 40))]
BY_CLIENT = dict(enumerate(PER_CLIENT))
PER_ROW = [row % 2 for row in range(ROWS)]
TYPES = ["int8", "uint8", "int64", "uint64", "float32", "bool", "object", "U4", "datetime64[s]"]


def given_rows(given: Any, labels: Any, clients: int, rng: Any) -> Any:
    return given


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """An array of any type and shape, as NumPy or torch."""
    shape = draw(st.sampled_from([(0,), (1,), (ROWS,), (2, 20), (ROWS, 1), ()]))
    numbers = draw(st.lists(st.integers(-3, 50), min_size=1, max_size=5))
    try:
        made = np.resize(np.array(numbers), shape).astype(draw(st.sampled_from(TYPES)))
        return torch.from_numpy(made) if draw(st.booleans()) else made
    except (TypeError, ValueError):
        return np.array(numbers)  # no such array


@st.composite
def objects(draw: st.DrawFn) -> Any:
    """What a user may give: almost a partition, or anything."""
    made = draw(documents([PER_CLIENT, PER_ROW, BY_CLIENT]) | arrays() | st.lists(arrays(), max_size=3) | values)
    match draw(st.sampled_from(["as it is", "as it is", "arrays", "array", "tuple", "iterator"])):
        case "arrays" if isinstance(made, list):
            made = [as_array(one) for one in made]
        case "array":
            made = as_array(made)
        case "tuple" if isinstance(made, list):
            made = tuple(made)
        case "iterator" if isinstance(made, list):
            made = iter(made)
    return made


def as_array(value: Any) -> Any:
    try:
        return np.array(value)
    except (ValueError, OverflowError, UnicodeError):
        return value


def check_parts(parts: Any, clients: int) -> None:
    if isinstance(parts, PluribusError):
        return
    assert len(parts) == clients
    for part in parts:
        assert len(part) > 0
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all(), "sorted, and no row twice"
        assert 0 <= part[0] <= part[-1] < ROWS


@fuzzed()
@given(objects(), st.integers(1, 3), st.booleans())
def test_partitions_as_objects(given: Any, clients: int, of_function: bool) -> None:
    def divide() -> Any:
        taken = take_partition(partial(given_rows, given) if of_function else given)
        if isinstance(taken, str):
            return PluribusError("a name")
        return partition(taken, LABELS, clients, np.random.default_rng(0))

    with scratch() as folder:
        check_parts(survives(divide, folder), clients)


@fuzzed()
@given(objects(), st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS).map(sorted))
def test_partitions_of_some_rows(given: Any, rows: list[int]) -> None:
    def divide() -> Any:
        taken = take_partition(given)
        if isinstance(taken, str):
            return None
        return taken.within(np.array(rows, np.int64), ROWS).clients

    with scratch() as folder:
        survives(divide, folder)


@fuzzed(0.25)
@given(objects(), st.none() | st.integers(1, 3), st.sampled_from(["own", "common"]))
def test_experiments_with_a_partition(given: Any, clients: int | None, test: str) -> None:
    how: dict[str, Any] = {
        "data": few_digits(ROWS, 3),
        "models": "mlp-64",
        "device": "cpu",
        "test": test,
        "threads": 1,
        "workers": 1,
    }
    if clients is not None:
        how["clients"] = clients

    def make() -> Any:
        parts = assemble(experiment("local", partition=given, **how))
        return [sorted(parts.data.rows(k)["train"].tolist()) for k in parts.cards]

    if isinstance(given, str) and "." in given:
        return  # a dotted path, which is imported
    with scratch() as folder:
        found = survives(make, folder)
    if not isinstance(found, PluribusError):
        assert all(0 <= row < len(load(few_digits(ROWS, 3)).y) for rows in found for row in rows)


@fuzzed()
@given(scalars, scalars, scalars, scalars, scalars)
def test_settings_of_partitions(alpha: Any, classes: Any, mass: Any, fewest: Any, share: Any) -> None:
    """Each with one that is right by type, as settings are checked before."""

    def divide() -> Any:
        number = alpha if isinstance(alpha, float) else None
        held = classes if type(classes) is int else None
        how: dict[str, Any] = {"alpha": number, "classes_per_client": held}
        how |= {"mass": mass if isinstance(mass, str) else None, "min_samples": fewest if type(fewest) is int else None}
        how["min_share"] = share if isinstance(share, float) else None
        for kind in ("pathological", "class-mass", "dirichlet", "fedhpl-noniid", "fedhpl-dir", "fedhpl-dir-clients"):
            survives(partial(partition, kind, LABELS, 2, np.random.default_rng(0), **how), folder)

    with scratch() as folder:
        divide()

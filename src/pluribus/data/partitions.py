"""Partitions by name, and those that a user gives: a function, row numbers per client, or a client number per row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pluribus.data.partition import (
    NO_OWNER,
    Parts,
    Rng,
    by_domain,
    class_mass,
    deal,
    dirichlet,
    fedhpl_by_class,
    fedhpl_dir,
    iid,
    natural,
    pathological,
    rows_by_owner,
    sample,
)
from pluribus.errors import FormatError, PartitionError, RangeError, UserCodeError, unknown
from pluribus.internal.blame import at
from pluribus.internal.lookup import dotted_path, given_name, import_dotted, object_name, refuse_given
from pluribus.internal.registry import check_free

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PartitionKind:
    """A kind of partition: its function, one line about it, and whether each row has at most one owner."""

    function: Callable[..., Any]
    about: str
    disjoint: bool = True

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the parameters that this kind uses."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


NATURAL = "natural"
PARTITIONS: dict[str, PartitionKind] = {
    "iid": PartitionKind(iid, "equal random shares"),
    "pathological": PartitionKind(pathological, "exactly --classes-per-client classes each, --unequal in size"),
    "class-mass": PartitionKind(class_mass, "each client's rows divided among its classes by --mass (FedFree)"),
    "dirichlet": PartitionKind(dirichlet, "each class cut by Dir(--alpha), full clients left out (HtFLlib)"),
    "fedhpl-noniid": PartitionKind(
        partial(fedhpl_by_class, deal), "each class cut by Dir(--alpha), alpha random if not given (FedHPL)"
    ),
    "fedhpl-dir": PartitionKind(fedhpl_dir, "overlapping: each client mixes classes by Dir (FedHPL, CIFAR-10)", False),
    "fedhpl-dir-clients": PartitionKind(
        partial(fedhpl_by_class, sample),
        "overlapping: each class over clients by Dir (FedHPL, CIFAR-100 and SVHN)",
        disjoint=False,
    ),
    "domain": PartitionKind(by_domain, "client k holds domain k mod D"),
    NATURAL: PartitionKind(natural, "client k holds the rows of the k-th holder that the data names"),
}


BUILT_IN = tuple(PARTITIONS)
BY_CLASS = tuple(kind for kind in BUILT_IN if kind not in ("iid", "domain", NATURAL))


def register_partition(name: str, about: str, *, disjoint: bool = True) -> Callable[[F], F]:
    """Register a function `(labels, clients, rng)` that returns row numbers per client, or a client number per row.

    Its keyword-only parameters are settings of the experiment, such as `alpha`. `disjoint` says whether each row has at
    most one owner.
    """

    def add(function: F) -> F:
        known = PARTITIONS.get(name)
        check_free("partition", name, known and known.function, function)
        PARTITIONS[name] = PartitionKind(function, about, disjoint)
        return function

    return add


@dataclass(frozen=True, eq=False)
class OwnPartition:
    """A partition that is given as an object: a function, row numbers per client, or a client number per row."""

    name: str
    source: Callable[..., Any] | Parts | np.ndarray = field(repr=False)

    @property
    def clients(self) -> int | None:
        """The number of clients. None: the function decides the rows of any number of clients."""
        if callable(self.source):
            return None
        return len(self.source) if isinstance(self.source, list) else int(self.source.max(initial=NO_OWNER)) + 1

    def within(self, rows: np.ndarray, total: int) -> OwnPartition:
        """The partition of some rows of the data set. The other rows are the test set of all clients."""
        if callable(self.source) or len(rows) == total:
            return self
        if not isinstance(self.source, list):
            return replace(self, source=self.source[rows] if len(self.source) == total else self.source)
        for client, part in enumerate(self.source):
            if len(tested := np.setdiff1d(part, rows)):
                why = "but that row is in the test set of all clients"
                raise PartitionError(f"partition '{self.name}' gives row {tested[0]} to client {client}, {why}.")
        return replace(self, source=[np.searchsorted(rows, part) for part in self.source])

    @property
    def kind(self) -> PartitionKind:
        function = self.source if callable(self.source) else partial(_given_rows, self.source)
        return PartitionKind(function, "given in Python", disjoint=not isinstance(self.source, list))


def take_partition(value: Any) -> str | OwnPartition:
    """The value of the setting `partition`."""
    if isinstance(value, str | OwnPartition):
        return value
    if callable(value):
        return dotted_path(value) or OwnPartition(given_name(object_name(value)), value)
    numbers = None if isinstance(value, Mapping) else _whole_numbers(value)
    if numbers is not None and len(numbers):
        _check_owners(numbers, "partition", len(numbers))
        return OwnPartition(given_name("client-numbers"), numbers)
    if isinstance(value, Mapping):
        if missing := [client for client in range(len(value)) if client not in value]:
            raise PartitionError(f"partition gives rows to {len(value)} clients, but has none for client {missing[0]}.")
        value = [value[client] for client in range(len(value))]
    parts = [_whole_numbers(rows) for rows in value] if isinstance(value, Sequence) else []
    if parts and all(part is not None for part in parts):
        return OwnPartition(given_name("row-numbers"), [part for part in parts if part is not None])
    raise FormatError(
        "--partition must be a name, a function, one client number per row, or one list of row numbers per client, not "
        f"{value!r:.80}."
    )


def name_partition(value: str | OwnPartition) -> str:
    """The name of the setting `partition` in files and tables."""
    return value if isinstance(value, str) else value.name


def _check_owners(owners: np.ndarray, what: str, most: int) -> None:
    """Refuse numbers of clients that cannot be: there are at most as many clients as rows."""
    if owners.min() < NO_OWNER:
        raise PartitionError(
            f"{what} has the client number {owners.min()}: use {NO_OWNER} for rows that no client holds."
        )
    if owners.max() >= most:
        raise PartitionError(f"{what} names client {owners.max()}, but there are at most {most} clients, from 0.")


def _whole_numbers(values: Any) -> np.ndarray | None:
    """A list or array of whole numbers, as int64. None if it is none."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # no array, such as lists of different lengths
        return None
    if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
        return None
    if array.dtype == np.uint64 and len(array) and array.max() > np.iinfo(np.int64).max:
        return None
    return array.astype(np.int64) if len(array) else np.empty(0, np.int64)


def _given_rows(source: Parts | np.ndarray, labels: np.ndarray, clients: int, rng: Rng) -> Parts | np.ndarray:
    return source


def find_partition(kind: str | OwnPartition) -> PartitionKind:
    """The kind of a name, a dotted path or an object."""
    if isinstance(kind, OwnPartition):
        return kind.kind
    refuse_given("partition", kind)
    if kind in PARTITIONS:
        return PARTITIONS[kind]
    if "." not in kind:
        raise unknown("partition", kind, PARTITIONS, "pluribus list partitions")
    function = import_dotted(kind, "partition")
    if not callable(function):
        raise UserCodeError(f"partition '{kind}' is not a function of labels, clients and a random generator.")
    return PartitionKind(function, "your own function", disjoint=False)


def partition(
    kind: str | OwnPartition,
    labels: np.ndarray,
    clients: int,
    rng: Rng,
    *,
    domain: np.ndarray | None = None,
    holder: np.ndarray | None = None,
    classes_per_client: int | None = None,
    unequal: bool | None = None,
    mass: str | None = None,
    alpha: float | None = None,
    min_samples: int | None = None,
    min_share: float | None = None,
) -> Parts:
    """Sorted row numbers per client. A kind uses only its own parameters. None: the default of the kind."""
    found = find_partition(kind)
    if clients < 1:
        raise RangeError(f"--clients must be at least 1, not {clients}.")
    if alpha is not None and not 0 < alpha < float("inf"):
        raise RangeError(f"--alpha must be a number above 0, not {alpha}.")
    if min_share is not None and not 0 <= min_share <= 1:
        raise RangeError(f"--min-share must be in [0, 1], not {min_share}.")
    if kind == "domain":
        if domain is None:
            raise PartitionError("partition 'domain' needs a data set with domains, such as rotated-digits or pacs.")
        labels = domain
    if kind == NATURAL:
        if holder is None:
            raise PartitionError(
                "partition 'natural' needs data that names a client for each row: name its column, such as "
                "--columns client=NAME, or put images at client/class/*.jpg."
            )
        labels = holder
    offered: dict[str, Any] = {"classes_per_client": classes_per_client, "unequal": unequal, "mass": mass}
    offered |= {"alpha": alpha, "min_samples": min_samples, "min_share": min_share}
    given = {name: value for name, value in offered.items() if name in found.reads and value is not None}
    name = name_partition(kind)
    with at(f"partition {name}"):
        parts: Parts = found.function(labels, clients, rng, **given)
    if name not in BUILT_IN:
        parts = _check_rows(parts, name, len(labels), clients)
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise PartitionError(
                f"client {client} got no data from partition '{name}': use fewer clients (--clients) or more data."
            )
    return parts


def _check_rows(parts: Any, name: str, rows: int, clients: int) -> Parts:
    """Sorted row numbers per client, from what a user's function or object gives."""
    owners = _whole_numbers(parts) if isinstance(parts, np.ndarray) else None
    if owners is not None:
        if len(owners) != rows:
            raise PartitionError(f"partition '{name}' has {len(owners)} client numbers, but the data has {rows} rows.")
        _check_owners(owners, f"partition '{name}'", clients)
        return rows_by_owner(owners, clients)
    given_parts = [_whole_numbers(part) for part in parts] if isinstance(parts, Sequence) else [None]
    held = [part for part in given_parts if part is not None]
    if len(held) < len(given_parts):
        what = type(parts).__name__
        raise UserCodeError(f"partition '{name}' must give row numbers per client or a client per row, not {what}.")
    if len(held) != clients:
        raise PartitionError(f"partition '{name}' divides the data among {len(held)} clients, not {clients}.")
    found = [np.unique(part) for part in held]
    for client, (part, given) in enumerate(zip(found, held, strict=True)):
        if len(part) != len(given):
            raise PartitionError(f"partition '{name}' gives a row to client {client} twice.")
        if len(part) and not 0 <= part[0] <= part[-1] < rows:
            row = part[0] if part[0] < 0 else part[-1]
            raise PartitionError(f"partition '{name}' gives row {row} to client {client}: rows are 0 to {rows - 1}.")
    return found

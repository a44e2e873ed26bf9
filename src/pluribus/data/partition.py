"""Partitions of a data set: pure functions from labels to one sorted array of row numbers per client.

All randomness comes from the given generator. If every row has at most one owner, a partition is computed as an array
`owner` with the client of each row. Only the kinds that say so let clients share rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pluribus.data.split import ROUNDING
from pluribus.errors import DamagedDataError, FormatError, PartitionError, RangeError

Parts = list[np.ndarray]
Rng = np.random.Generator

NO_OWNER = -1
ATTEMPTS = 1000
LEAST_SHARE = 0.1
MIN_SHARE = 0.01
MIN_SHARE_OF = {"cifar100": 0.1, "svhn": 0.005}  # FedHPL, Appendix C.5.4; MIN_SHARE is its value for CIFAR-10


def iid(labels: np.ndarray, clients: int, rng: Rng) -> Parts:
    """Every client gets an equal random share of all rows."""
    return rows_by_owner(rng.permutation(np.arange(len(labels)) % clients), clients)


def natural(holder: np.ndarray, clients: int, rng: Rng) -> Parts:
    """Client k holds the rows of holder k. With fewer clients than holders, the rows of the last holders have none."""
    holders = int(holder.max()) + 1
    if clients > holders:
        raise PartitionError(
            f"the data names {holders} clients, fewer than {clients}: use --clients {holders} or less."
        )
    return rows_by_owner(np.where(holder < clients, holder, NO_OWNER), clients)


def pathological(
    labels: np.ndarray, clients: int, rng: Rng, *, classes_per_client: int = 2, unequal: bool = False
) -> Parts:
    """Every client holds exactly `classes_per_client` classes, and owners per class differ by at most one.

    Clients take consecutive classes of one random circle. A class is divided evenly among its owners or, if
    `unequal`, by shares drawn from U(0.1, 1). If there are more classes than slots, some classes have no owner.
    """
    classes = rng.permutation(np.unique(labels))
    if not 1 <= classes_per_client <= len(classes):
        raise RangeError(f"--classes-per-client must be in 1..{len(classes)}, not {classes_per_client}.")
    slots = np.arange(clients * classes_per_client)
    owner = np.full(len(labels), NO_OWNER)
    for at, label in enumerate(classes):
        owners = slots[at :: len(classes)] // classes_per_client
        rows = rng.permutation(np.flatnonzero(labels == label))
        if len(rows) < len(owners):
            raise PartitionError(
                f"class {label} has {len(rows)} samples for {len(owners)} clients: "
                "use fewer clients (--clients) or fewer classes per client (--classes-per-client)."
            )
        if len(owners):
            shares = rng.uniform(LEAST_SHARE, 1, len(owners)) if unequal else np.ones(len(owners))
            owner[rows] = np.repeat(owners, 1 + _cut(len(rows) - len(owners), shares))
    return rows_by_owner(owner, clients)


def class_mass(labels: np.ndarray, clients: int, rng: Rng, *, mass: str = "8:1:1") -> Parts:
    """Every client holds the same number of rows, divided by `mass` among its first class, its second class and so on.

    The first classes of the clients are consecutive on one random circle, and a client's other classes follow its first
    one. Clients are as large as the scarcest class allows. The remaining rows of the other classes have no owner.
    """
    shares, sizes = parse_mass(mass), _class_sizes(labels)
    if len(shares) > len(sizes):
        raise PartitionError(f"--mass {mass} names {len(shares)} classes, but the data set has {len(sizes)}.")
    everyone = np.arange(clients)[:, None]
    holds = rng.permutation(len(sizes))[(everyone + np.arange(len(shares))) % len(sizes)]  # clients x classes of each
    demand = np.bincount(holds.ravel(), np.tile(shares / shares.sum(), clients), len(sizes))
    rows = 1 + int((sizes[demand > 0] / demand[demand > 0]).min())
    counts = np.zeros((len(sizes), clients), np.int64)
    while True:  # rounding may need a few rows more than there are
        counts[holds, everyone] = _cut(rows, shares)
        if (counts.sum(axis=1) <= sizes).all():
            break
        rows -= 1
    if counts[holds, everyone].min() < 1:
        raise PartitionError(
            f"{rows} samples per client leave a class of --mass {mass} without samples: "
            "use fewer clients (--clients) or a more even --mass."
        )
    return deal(labels, counts, rng)


def parse_mass(text: str) -> np.ndarray:
    """Parse numbers such as `8:1:1`."""
    try:
        found = np.array([float(part) for part in text.split(":")])
    except ValueError:
        found = np.zeros(1)
    if not (np.isfinite(found) & (found > 0)).all():
        raise FormatError(f"--mass must be numbers above 0 separated by colons, such as 8:1:1, not '{text}'.")
    return found


def dirichlet(labels: np.ndarray, clients: int, rng: Rng, *, alpha: float = 1.0, min_samples: int = 1) -> Parts:
    """Divide each class by Dir(alpha) among the clients that hold less than an equal share of all rows."""
    sizes = _class_sizes(labels)

    def draw() -> np.ndarray:
        counts = np.zeros((len(sizes), clients), np.int64)
        held = np.zeros(clients, np.int64)
        for row, size in zip(counts, sizes, strict=True):
            # Drawing for the open clients alone has the same distribution as drawing for all, dropping the others and
            # renormalizing. It never leaves a sum of zero to divide by.
            open_clients = np.flatnonzero(held * clients < len(labels))
            row[open_clients] = _cut(size, rng.dirichlet(np.full(len(open_clients), alpha)))
            held += row
        return counts

    return deal(labels, _draw_until_enough(draw, len(labels), clients, min_samples), rng)


def fedhpl_by_class(
    give: Callable[[np.ndarray, np.ndarray, Rng], Parts],
    labels: np.ndarray,
    clients: int,
    rng: Rng,
    *,
    alpha: float | None = None,
    min_samples: int = 1,
    min_share: float = MIN_SHARE,
) -> Parts:
    """Divide each class by Dir(alpha) among all clients; without alpha, by Dir of a random point of the simplex.

    Every client holds at least `min_share` of each class. `give` is `_deal`, or `_sample` if clients may share rows.
    """
    sizes = _class_sizes(labels)
    floors = _floor(sizes, clients, min_share)

    def draw() -> np.ndarray:
        by_class = zip(floors, sizes, strict=True)
        return np.stack([_cut_above(n, size, _simplex(clients, alpha, rng), min_share) for n, size in by_class])

    return give(labels, _draw_until_enough(draw, len(labels), clients, min_samples), rng)


def fedhpl_dir(
    labels: np.ndarray,
    clients: int,
    rng: Rng,
    *,
    alpha: float | None = None,
    min_samples: int = 1,
    min_share: float = MIN_SHARE,
) -> Parts:
    """Every client draws the same number of rows from all rows, with class shares from Dir(alpha) over classes.

    That number includes `min_share` of each class, which is assigned first. If a share exceeds its class, the excess
    goes to the client's other classes, by share.
    """
    sizes = _class_sizes(labels)
    each = round(len(labels) / clients)
    if each < min_samples:
        raise _too_many_clients(len(labels), clients, min_samples)
    floor = _floor(sizes, clients, min_share)
    rest, least = each - floor.sum(), floor / max(each, 1)
    mixes = [np.maximum(_simplex(len(sizes), alpha, rng) - least, 0) for _ in range(clients)]
    counts = np.stack([_cut_within(rest, mix, sizes - floor) for mix in mixes], axis=1) + floor[:, None]
    return sample(labels, counts, rng)


def by_domain(domain: np.ndarray, clients: int, rng: Rng) -> Parts:
    """Client k holds domain k mod D. The clients of a domain divide it evenly."""
    domains = int(domain.max()) + 1
    if clients < domains:
        raise PartitionError(f"the data set has {domains} domains: use at least as many --clients, not {clients}.")
    owner = np.empty(len(domain), np.int64)
    for number in range(domains):
        rows = rng.permutation(np.flatnonzero(domain == number))
        owners = np.arange(number, clients, domains)
        owner[rows] = owners[np.arange(len(rows)) % len(owners)]
    return rows_by_owner(owner, clients)


# Shared by the kinds --------------------------------------------------------------------------------------------------


def rows_by_owner(owner: np.ndarray, clients: int) -> Parts:
    """Sorted row numbers per client, from the client of each row."""
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(clients + 1))
    return [order[start:end] for start, end in pairwise(bounds)]


def _class_sizes(labels: np.ndarray) -> np.ndarray:
    return np.unique(labels, return_counts=True)[1]


def _cut(total: int, shares: np.ndarray) -> np.ndarray:
    """Whole numbers that sum to total, each at most 1 away from its share. Shares that are all 0 count as equal."""
    if shares.sum() == 0:
        shares = np.ones_like(shares)
    bounds = np.rint(np.cumsum(shares) / shares.sum() * total).astype(np.int64)
    return np.diff(bounds, prepend=0)


def _cut_within(total: int, shares: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Whole numbers near total * shares that sum to total, none above its room."""
    given = np.zeros_like(room)
    while left := total - given.sum():
        space = room - given
        weight = np.where(space > 0, shares, 0.0)
        if weight.sum() == 0:
            weight = space.astype(float)
        given += np.minimum(_cut(left, weight), space)
    return given


def _simplex(size: int, alpha: float | None, rng: Rng) -> np.ndarray:
    """A draw from Dir(alpha); without alpha, from Dir(a) with `a` itself uniform on the simplex."""
    return rng.dirichlet(rng.dirichlet(np.ones(size)) if alpha is None else np.full(size, alpha))


def _cut_above(floor: int, size: int, shares: np.ndarray, min_share: float) -> np.ndarray:
    """Divide a class: `floor` rows per client, and the rest by the excess of each share over `min_share`."""
    return floor + _cut(size - len(shares) * floor, np.maximum(shares - min_share, 0))


def _floor(sizes: np.ndarray, clients: int, min_share: float) -> np.ndarray:
    """Minimum number of rows of each class per client: `min_share` of the class, rounded down."""
    if clients * min_share > 1 + ROUNDING:
        raise PartitionError(
            f"{clients} clients cannot each hold a share of {min_share:g} of every class: "
            f"use fewer clients (--clients) or a --min-share of at most 1/{clients}."
        )
    return np.floor(sizes * min_share + ROUNDING).astype(np.int64)


def _draw_until_enough(draw: Callable[[], np.ndarray], rows: int, clients: int, min_samples: int) -> np.ndarray:
    """Draw tables (classes x clients) until one gives every client `min_samples`."""
    if clients * min_samples > rows:
        raise _too_many_clients(rows, clients, min_samples)
    for _ in range(ATTEMPTS):
        counts = draw()
        if counts.sum(axis=0).min() >= min_samples:
            return counts
    raise PartitionError(
        f"{ATTEMPTS} draws left some of {clients} clients with less than {min_samples} samples: "
        "use fewer clients (--clients), a smaller --min-samples or a larger --alpha."
    )


def _too_many_clients(rows: int, clients: int, min_samples: int) -> PartitionError:
    return PartitionError(
        f"{rows} samples do not give {clients} clients {min_samples} each: "
        "use fewer clients (--clients) or a smaller --min-samples."
    )


def deal(labels: np.ndarray, counts: np.ndarray, rng: Rng) -> Parts:
    """Assign rows to disjoint parts with these counts (classes x clients). The remaining rows have no owner."""
    classes, clients = np.unique(labels), counts.shape[1]
    owner = np.full(len(labels), NO_OWNER)
    for label, row in zip(classes, counts, strict=True):
        members = rng.permutation(np.flatnonzero(labels == label))[: row.sum()]
        owner[members] = np.repeat(np.arange(clients), row)
    return rows_by_owner(owner, clients)


def sample(labels: np.ndarray, counts: np.ndarray, rng: Rng) -> Parts:
    """Draw parts with these counts (classes x clients), each from all rows without replacement."""
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return [
        np.sort(np.concatenate([rng.choice(m, size, replace=False) for m, size in zip(members, column, strict=True)]))
        for column in counts.T
    ]


@dataclass(frozen=True)
class Manifest:
    """A summary of a partition: enough to show it, and to tell whether another run has the same one."""

    kind: str
    parameters: dict[str, Any]
    seed: int
    counts: list[list[int]]  # rows per client and class
    digest: str  # depends on every label and every row number of every client, and not on the machine

    @classmethod
    def of(
        cls, kind: str, parameters: dict[str, Any], seed: int, labels: np.ndarray, parts: Parts, n_classes: int
    ) -> Manifest:
        counts = [np.bincount(labels[part], minlength=n_classes).tolist() for part in parts]
        return cls(kind, dict(parameters), seed, counts, _digest([labels, *parts]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as reason:
            raise DamagedDataError(f"this is not the manifest of a partition ({reason}): write it again.") from reason


def _digest(arrays: Parts) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        # with lengths, so that a row that moves from the end of one client to the start of the next changes the digest
        digest.update(np.array(len(array), "<i8").tobytes())
        digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()

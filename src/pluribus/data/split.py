"""The split of one client's rows into parts such as train, val and test, as stratified as whole samples allow."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pluribus.errors import ConflictError, RangeError

ROUNDING = 1e-9  # 100 * 0.29 is 28.999999999999996 but means 29


def split(labels: np.ndarray, fractions: Mapping[str, float], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Sorted positions per part. Parts are disjoint and contain all positions.

    Each class gives each part its whole samples. The odd samples bring the parts' totals as close to their fractions as
    possible. The first part is for training: it holds a sample of every class that occurs, even if another part then
    stays empty. Otherwise no part with a fraction above zero stays empty.
    """
    share = _shares(fractions)
    classes, number = np.unique(labels, return_inverse=True)
    table = _table(np.bincount(number, minlength=len(classes)), share, rng)
    part = np.empty(len(labels), np.int64)
    for row, counts in enumerate(table):
        part[rng.permutation(np.flatnonzero(number == row))] = np.repeat(np.arange(len(share)), counts)
    return {name: np.flatnonzero(part == at) for at, name in enumerate(fractions)}


def split_groups(
    labels: np.ndarray, fractions: Mapping[str, float], groups: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Like `split`, but all rows of a group are in one part. Groups count as samples of their most frequent class."""
    names, number = np.unique(groups, return_inverse=True)
    usual = np.array([np.bincount(labels[number == at]).argmax() for at in range(len(names))])
    cut = split(usual, fractions, rng)
    return {name: np.flatnonzero(np.isin(number, chosen)) for name, chosen in cut.items()}


def split_by_time(
    times: np.ndarray, fractions: Mapping[str, float], groups: np.ndarray | None = None, span: float = 0.0
) -> dict[str, np.ndarray]:
    """Sorted positions per part: of every group, the first rows are in the first part, and the last in the last.

    Rows that last for `span` and overlap a row of a later part are left out of the earlier part.
    """
    share = _shares(fractions)
    part = np.full(len(times), -1)
    done, before = 0, np.zeros(len(share), np.int64)  # rows of earlier groups, and how many were before each end
    for group in [None] if groups is None else np.unique(groups):
        members = np.arange(len(times)) if group is None else np.flatnonzero(groups == group)
        members = members[np.argsort(times[members], kind="stable")]
        # rounded over all groups so far: small groups would leave a small part empty
        done += len(members)
        total = np.rint(np.cumsum(share) * done + ROUNDING).astype(np.int64)
        ends = np.maximum.accumulate((total - before).clip(0, len(members)))
        before = before + ends
        part[members] = np.searchsorted(ends, np.arange(len(members)), side="right")
        for end in ends[:-1]:
            if span and 0 < end < len(members):
                late = times[members[:end]] + span > times[members[end]] + ROUNDING * span
                part[members[:end][late]] = -1
    return {name: np.flatnonzero(part == at) for at, name in enumerate(fractions)}


def _shares(fractions: Mapping[str, float]) -> np.ndarray:
    share = np.array(list(fractions.values()), float)
    text = ", ".join(f"{name} {value:g}" for name, value in fractions.items())
    if (share < -ROUNDING).any() or abs(share.sum() - 1) > 1e-6:
        raise RangeError(f"the fractions {text} must be positive and sum to 1.")
    if share[0] <= ROUNDING:
        raise ConflictError(f"the fractions {text} leave nothing for {next(iter(fractions))}: make the others smaller.")
    return np.where(share > ROUNDING, share, 0.0)


def _table(sizes: np.ndarray, share: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Number of samples of each class (rows) in each part (columns)."""
    exact = np.outer(sizes, share)
    table = np.floor(exact + ROUNDING).astype(np.int64)
    table[:, 0] = np.maximum(table[:, 0], 1)
    odd = sizes - table.sum(axis=1)
    quota = _odd_per_part(table.sum(axis=0), exact.sum(axis=0), int(odd.sum()))
    # classes in random order, so that no class always chooses first
    for row in rng.permutation(np.flatnonzero(odd)):
        for _ in range(odd[row]):
            part = int(np.where(quota > 0, exact[row] - table[row], -np.inf).argmax())
            table[row, part] += 1
            quota[part] -= 1
    _fill_empty(table, share)
    return table


def _odd_per_part(totals: np.ndarray, exact: np.ndarray, odd: int) -> np.ndarray:
    """Number of odd samples per part. Each goes to the part that lacks most, in a tie to the smallest part."""
    quota = np.zeros_like(totals)
    for _ in range(odd):
        lack = np.where(exact > 0, np.round(exact - totals - quota, 9), -np.inf)
        neediest = np.flatnonzero(lack == lack.max())
        quota[neediest[(totals + quota)[neediest].argmin()]] += 1
    return quota


def _fill_empty(table: np.ndarray, share: np.ndarray) -> None:
    """Move a sample into each empty part, from the largest part that can spare one."""
    for part in np.flatnonzero((table.sum(axis=0) == 0) & (share > 0)):
        spare = table.copy()
        spare[:, 0] -= 1  # training keeps one of each class
        spare[:, table.sum(axis=0) < 2] = 0
        if spare.max(initial=0) < 1:
            return
        donor = int(np.where(spare.max(axis=0) > 0, table.sum(axis=0), -1).argmax())
        row = int(spare[:, donor].argmax())
        table[row, donor] -= 1
        table[row, part] += 1

"""Bounds of the norms of fields, learned from what sites send in the first rounds.

The usual norm of a field is the median over sites, so that a minority of liars cannot raise it, and the largest of
these medians over the first rounds. A message may exceed it by a factor: honest sites differ, and norms grow with
training. Norms are kept in the run folder, so that a server that is started again has the same bounds.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from pluribus.errors import SchemaError
from pluribus.storage.checks import is_client, is_number, is_table, read_table
from pluribus.storage.files import write_json

FIRST_ROUNDS = 3  # whose messages are learned from
FACTOR = 10.0  # by which a norm may exceed the usual one
IS_SITES = is_table(is_client, lambda norm: is_number(norm) and norm >= 0)
IS_ROUNDS = is_table(is_client, lambda sites: IS_SITES(sites) and bool(sites))
REMEDY = "Delete it, and the bounds are learned again if the first rounds are not over; or start a new run."


class LearnedNorms:
    """The norms of the first rounds: exchange and field -> round -> site -> norm."""

    def __init__(self, file: Path, first: int) -> None:
        """`first` is the first round in which models train."""
        self._file, self._end = file, first + FIRST_ROUNDS
        self._known: dict[str, dict[str, dict[str, float]]] = read_table(file, IS_ROUNDS, REMEDY)

    def check(self, t: int, stage: int, site: int, norms: dict[str, float]) -> None:
        """Learn from a message of the first rounds. Refuse a later one with a norm far above the usual one."""
        for name, norm in norms.items():
            at = f"{stage} {name}"
            if t < self._end:
                self._known.setdefault(at, {}).setdefault(str(t), {})[str(site)] = norm
            elif (most := self._bound(at)) is not None and norm > most:
                raise SchemaError(
                    f"its message: '{name}' has norm {norm:.3g}, more than {FACTOR:g} times the usual norm "
                    f"{most / FACTOR:.3g} of the first rounds."
                )
        if t < self._end and norms:
            write_json(self._file, self._known)

    def _bound(self, at: str) -> float | None:
        """Largest norm of a field. None: nobody sent it in the first rounds, or it was zero."""
        usual = max((median(sites.values()) for sites in self._known.get(at, {}).values()), default=0.0)
        return FACTOR * usual if usual else None

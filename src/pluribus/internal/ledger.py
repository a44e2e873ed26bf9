"""The ledger of communication: bytes per round, client, direction and tensor of serialized messages.

Most messages of a method share a few layouts (tensor names and sizes). So each layout is stored once, and a transfer
refers to it. The ledger of a thousand rounds of a ResNet stays small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pluribus.message import Parcel, tensor_bytes


class Entry(NamedTuple):
    """One tensor of one transfer."""

    round: int
    exchange: int
    client: int
    direction: str
    tensor: str
    bytes: int


DIRECTIONS = ("up", "down", "evaluation")


@dataclass(frozen=True)
class _Transfer:
    round: int
    exchange: int
    client: int
    direction: str
    layout: int


class Ledger:
    """All transfers. Directions are `up`, `down` and `evaluation` (downloads for evaluation only)."""

    def __init__(self) -> None:
        self.layouts: list[dict[str, int]] = []
        self._known: dict[tuple[tuple[str, int], ...], int] = {}
        self._transfers: list[_Transfer] = []
        self._fresh: list[dict[str, Any]] = []
        self.total = dict.fromkeys(DIRECTIONS, 0)

    def add(self, round: int, exchange: int, client: int, direction: str, data: bytes | Parcel) -> None:
        layout = data.layout if isinstance(data, Parcel) else tensor_bytes(data)
        key = tuple(layout.items())
        if key not in self._known:
            self._record({"layout": len(self.layouts), "tensors": layout})
        self._record(vars(_Transfer(round, exchange, client, direction, self._known[key])))

    def _record(self, line: dict[str, Any]) -> None:
        self._fresh.append(line)
        self.replay(line)

    def entries(self) -> Iterator[Entry]:
        """Every tensor of every transfer, in order."""
        for item in self._transfers:
            for tensor, size in self.layouts[item.layout].items():
                yield Entry(item.round, item.exchange, item.client, item.direction, tensor, size)

    def by(self, column: str, direction: str | None = None) -> dict[Any, int]:
        """Bytes summed by a column: `round`, `client`, `direction` or `tensor`."""
        sums: Counter[Any] = Counter()
        for entry in self.entries():
            if direction in (None, entry.direction):
                sums[getattr(entry, column)] += entry.bytes
        return dict(sums)

    def flush(self) -> list[dict[str, Any]]:
        """The entries since the last flush, as lines for `traffic.jsonl`."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def replay(self, line: Mapping[str, Any]) -> None:
        """Add a line of `traffic.jsonl` (for resume and reports)."""
        if "tensors" in line:
            layout = dict(line["tensors"])
            self._known[tuple(layout.items())] = len(self.layouts)
            self.layouts.append(layout)
        else:
            transfer = _Transfer(**line)
            self._transfers.append(transfer)
            self.total[transfer.direction] += sum(self.layouts[transfer.layout].values())

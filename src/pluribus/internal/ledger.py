"""The ledger of communication: bytes per round, client, direction and tensor, as they were serialised.

Messages of one method mostly repeat the same few layouts (tensor names and sizes), so each layout is kept once and a
transfer is a reference to it. A thousand rounds of a ResNet stay small.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class _Transfer:
    round: int
    exchange: int
    client: int
    direction: str
    layout: int


class Ledger:
    """What travelled. Directions are `up`, `down` and `evaluation` (downloads made only to measure)."""

    def __init__(self) -> None:
        self.layouts: list[dict[str, int]] = []
        self._known: dict[tuple[tuple[str, int], ...], int] = {}
        self._transfers: list[_Transfer] = []
        self._fresh: list[dict[str, Any]] = []
        self.total = {"up": 0, "down": 0, "evaluation": 0}

    def add(self, round: int, exchange: int, client: int, direction: str, data: bytes | Parcel) -> None:
        """Book one serialised message."""
        layout = data.layout if isinstance(data, Parcel) else tensor_bytes(data)
        key = tuple(layout.items())
        if key not in self._known:
            self._known[key] = len(self.layouts)
            self.layouts.append(layout)
            self._fresh.append({"layout": self._known[key], "tensors": layout})
        self._book(_Transfer(round, exchange, client, direction, self._known[key]), sum(layout.values()))

    def _book(self, transfer: _Transfer, size: int) -> None:
        self._transfers.append(transfer)
        self._fresh.append(vars(transfer))
        self.total[transfer.direction] += size

    def entries(self) -> Iterator[Entry]:
        """Every tensor of every transfer, in order."""
        for item in self._transfers:
            for tensor, size in self.layouts[item.layout].items():
                yield Entry(item.round, item.exchange, item.client, item.direction, tensor, size)

    def by(self, column: str, direction: str | None = None) -> dict[Any, int]:
        """Bytes summed by a column: `round`, `client`, `direction` or `tensor`."""
        sums: dict[Any, int] = {}
        for entry in self.entries():
            if direction in (None, entry.direction):
                key = getattr(entry, column)
                sums[key] = sums.get(key, 0) + entry.bytes
        return sums

    def flush(self) -> list[dict[str, Any]]:
        """What was booked since the last flush, as lines for `traffic.jsonl`."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def replay(self, line: Mapping[str, Any]) -> None:
        """Take a line of `traffic.jsonl` back in (resume, reports)."""
        if "tensors" in line:
            layout = dict(line["tensors"])
            self._known[tuple(layout.items())] = len(self.layouts)
            self.layouts.append(layout)
        else:
            transfer = _Transfer(**line)
            self._transfers.append(transfer)
            self.total[transfer.direction] += sum(self.layouts[transfer.layout].values())

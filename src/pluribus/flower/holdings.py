"""What a site brings into a federation: its own sets of images, and the public ones that all sites have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pluribus.data import Dataset
from pluribus.data.federated import Data, Store

OWN = ("train", "val", "test")


@dataclass(frozen=True)
class Public:
    """Images that every site has in its hands before the first round, and whose they are."""

    dataset: Dataset
    owner: Tensor
    """(N,) int64: the client that gave a row."""

    def sizes(self, clients: int) -> tuple[int, ...]:
        """How many rows each client gave."""
        return tuple(int((self.owner == k).sum()) for k in range(clients))

    def digest(self) -> str:
        """Equal for equal images, labels and owners in the same order."""
        found = hashlib.sha256()
        for column in (self.dataset.x, self.dataset.y, self.owner):
            found.update(column.contiguous().numpy().tobytes())
        return found.hexdigest()


class Holdings:
    """A client's sets in one store; a stand-in for the data set of a simulation, with one client in it."""

    def __init__(self, own: Mapping[str, Dataset], public: Public | None, device: torch.device) -> None:
        columns = [own[name] for name in OWN] + ([public.dataset] if public else [])
        self._store = Store(torch.cat([c.x for c in columns]), torch.cat([c.y for c in columns]), device)
        ends = torch.tensor([len(c.y) for c in columns]).cumsum(0).tolist()
        self._rows = {name: torch.arange(end - len(own[name].y), end) for name, end in zip(OWN, ends, strict=False)}
        self._public = public
        self._private = ends[len(OWN) - 1]
        self._device = device

    def sets(self, k: int) -> dict[str, Data]:
        """The client's `train`, `val`, `test` and `public` sets."""
        own = {name: Data(self._store, rows.to(self._device)) for name, rows in self._rows.items()}
        return own | {"public": self.public().get(k, Data(self._store, torch.arange(0, device=self._device)))}

    def rows(self, k: int) -> dict[str, Tensor]:
        """Where the sets lie."""
        return self._rows

    def samples(self, k: int) -> int:
        """Size of the training set, n_k."""
        return len(self._rows["train"])

    def public(self) -> dict[int, Data]:
        """Every client's public set."""
        if self._public is None:
            return {}
        owners = sorted(set(self._public.owner.tolist()))
        rows = {k: self._private + (self._public.owner == k).nonzero().flatten() for k in owners}
        return {k: Data(self._store, at.to(self._device)) for k, at in rows.items()}

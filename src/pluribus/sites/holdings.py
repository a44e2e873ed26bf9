"""The data of a site: its own sets of images, and the public images that all sites have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from pluribus.data import Dataset, load
from pluribus.data.federated import Data, ExamSets, Store
from pluribus.data.folders import normalize_name
from pluribus.data.npz import read_arrays
from pluribus.errors import DamagedDataError, DataError

OWN = ("train", "val", "test")
OWNER = "owner"  # the column of an npz file


@dataclass(frozen=True)
class Public:
    """Images that every site has before the first round, and their owners."""

    dataset: Dataset
    owner: Tensor | None = None
    """(N,) int64: the client that owns a row. None: clients own equal shares of the rows, in order."""

    @classmethod
    def read(cls, path: str, image_size: int | None) -> Public:
        """Read anything that `load` can read. An npz file may have a column `owner` with the owner of each row."""
        dataset, file = load(path, image_size=image_size), Path(path).expanduser()
        columns = read_arrays(file, [OWNER]) if file.suffix == ".npz" and file.is_file() else {}
        if OWNER not in columns:
            return cls(dataset)
        column, rows = columns[OWNER], len(dataset.y)
        if column.shape != (rows,) or not np.issubdtype(column.dtype, np.integer):
            raise DamagedDataError(
                f"{file} cannot be used: {OWNER} must be a row of {rows} integers, one client number per image, "
                f"not {column.dtype} {column.shape}."
            )
        return cls(dataset, torch.from_numpy(column.astype(np.int64)))

    def owners(self, clients: int) -> Tensor:
        """Owner of each row, in a federation of so many clients."""
        if self.owner is None:
            rows = len(self.dataset.y)
            return torch.arange(rows) * clients // rows
        low, high = int(self.owner.min()), int(self.owner.max())
        if low < 0 or high >= clients:
            raise DataError(
                f"the public images have owners from {low} to {high}, but this federation has {clients} clients: "
                f"owners must be in 0..{clients - 1}."
            )
        return self.owner

    def sizes(self, clients: int) -> tuple[int, ...]:
        return tuple(self.owners(clients).bincount(minlength=clients).tolist())

    def digest(self, clients: int) -> str:
        """A hash of images, labels and owners, in order."""
        found = hashlib.sha256()
        for column in (self.dataset.x, self.dataset.y, self.owners(clients)):
            found.update(column.contiguous().numpy().tobytes())
        return found.hexdigest()


def relabel(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """Change labels to indices into these classes, by name. The data set may lack some of them."""
    known = [normalize_name(name) for name in classes]
    numbers = torch.tensor([known.index(normalize_name(name)) for name in dataset.classes])
    return Dataset(dataset.name, dataset.x, numbers[dataset.y], classes)


class Holdings:
    """The sets of the one client of a site, and the public sets, in one store."""

    def __init__(self, own: Mapping[str, Dataset], public: Public | None, clients: int, device: torch.device) -> None:
        columns = [own[name] for name in OWN] + ([public.dataset] if public else [])
        self._store = Store(torch.cat([c.x for c in columns]), torch.cat([c.y for c in columns]), device)
        ends = torch.tensor([len(c.y) for c in columns]).cumsum(0).tolist()
        self._rows = {name: torch.arange(end - len(own[name].y), end) for name, end in zip(OWN, ends, strict=False)}
        self._device = device
        owners, private = public.owners(clients) if public else None, ends[len(OWN) - 1]
        owned = {} if owners is None else {k: (owners == k).nonzero().flatten() for k in range(clients)}
        self.public = {k: self._data(private + rows) for k, rows in owned.items()}

    def sets(self, client: int) -> dict[str, Data]:
        own = {name: self._data(rows) for name, rows in self._rows.items()}
        return own | {"public": self.public.get(client, self._data(torch.arange(0)))}

    def public_for(self, client: int) -> Mapping[int, Data]:
        return self.public

    def exams_for(self, client: int) -> ExamSets:
        return MappingProxyType({})  # real sites have no domains

    def _data(self, rows: Tensor) -> Data:
        return Data(self._store, rows.to(self._device))

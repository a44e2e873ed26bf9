"""One data set, divided among many clients: a store on the device, and row numbers into it.

A client's sets are row numbers. They are computed on first use, so that ten thousand clients cost nothing until they
participate. Images are stored as they are given, and `take` converts bytes to numbers in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from pluribus.data.augment import Augment
from pluribus.data.dataset import PARTS, Dataset
from pluribus.data.split import split
from pluribus.draws import numpy_rng
from pluribus.errors import MismatchError


class Store:
    """All images and labels of an experiment, on the device."""

    def __init__(self, x: Tensor, y: Tensor, device: torch.device, channels_last: bool = False) -> None:
        self.x = x.to(device)
        self.y = y.to(device)
        self._layout = torch.channels_last if channels_last else torch.contiguous_format

    def take(self, rows: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Images and labels of these rows. Bytes become numbers in [-1, 1]."""
        x = self.x[rows]
        if x.dtype == torch.uint8:
            x = x.to(torch.float32).mul_(1 / 127.5).sub_(1.0)
        if augment is not None:
            x = augment(x)
        return x.contiguous(memory_format=self._layout), self.y[rows]


@dataclass(frozen=True)
class Data:
    """Some rows of the store."""

    store: Store
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: Tensor | slice) -> Data:
        """The samples at these positions of the set, in this order."""
        if isinstance(positions, Tensor):
            positions = positions.to(self.rows.device)
        elif not isinstance(positions, slice):
            raise TypeError(f"a set is indexed by a tensor of positions or a slice, not by {type(positions).__name__}")
        return Data(self.store, self.rows[positions])

    def __add__(self, other: Data) -> Data:
        """The samples of this set, then those of another set of the same store."""
        return Data.join([self, other]) if isinstance(other, Data) else NotImplemented

    @staticmethod
    def join(sets: Iterable[Data]) -> Data:
        """All samples of some sets of one store, set after set."""
        first, *others = sets
        if any(other.store is not first.store for other in others):
            raise ValueError("sets of two stores cannot be joined")
        return Data(first.store, torch.cat([first.rows, *(other.rows for other in others)]))

    def take(self, positions: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Images and labels at these positions of the set."""
        return self.store.take(self.rows[positions], augment)

    def labels(self) -> Tensor:
        return self.store.y[self.rows]


ExamSets = Mapping[str, Mapping[str, Data]]  # domain -> `val` and `test`


class ClientSets(Protocol):
    """The rows that are with clients: the sets of each, and those that all of them know."""

    def sets(self, client: int) -> dict[str, Data]:
        """The client's `train`, `val`, `test` and `public` sets."""

    @property
    def public(self) -> Mapping[int, Data]:
        """Every client's public set, by owner."""

    @property
    def exams(self) -> ExamSets:
        """The val and test sets of every domain, where there are domains."""


@dataclass(frozen=True)
class Fractions:
    """Split of a client's rows. `test_on`: whether it is tested on its own rows or on rows that no client holds."""

    val: float = 0.1
    test: float = 0.2
    public: float = 0.0
    test_on: Literal["own", "official", "common"] = "own"

    def shares(self) -> dict[str, float]:
        """Fractions of a client's rows, training first. They sum to one."""
        test = self.test if self.test_on == "own" else 0.0
        return {"train": 1.0 - self.val - test - self.public, "val": self.val, "test": test, "public": self.public}


def common_test(dataset: Dataset, fractions: Fractions, seed: int) -> np.ndarray | None:
    """Rows that all clients are tested on and no client holds. None: each client is tested on its own rows."""
    if fractions.test_on == "own":
        return None
    if fractions.test_on == "common":
        return _draw_common_test(dataset, fractions.test, numpy_rng(seed, "common test"))
    if dataset.official is None:
        raise MismatchError(
            f"{dataset.name} has no official test set: use --test common, or leave out --test official."
        )
    return np.arange(dataset.official, len(dataset.y))


def _draw_common_test(dataset: Dataset, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw a share of all rows, stratified by class and domain. Copies of one image stay together."""
    strata, shares = dataset.y.numpy(), {"held": 1 - share, "test": share}
    if dataset.domain is not None:
        strata = strata * len(dataset.domains) + dataset.domain.numpy()
    if dataset.identity is None:
        return split(strata, shares, rng)["test"]
    identity = dataset.identity.numpy()
    identities, first = np.unique(identity, return_index=True)
    return np.flatnonzero(np.isin(identity, identities[split(strata[first], shares, rng)["test"]]))


class Federated:
    """A data set, its partition among clients, and the split of each client into train, val, test and public."""

    def __init__(
        self,
        dataset: Dataset,
        parts: Sequence[np.ndarray],
        fractions: Fractions,
        seed: int,
        device: torch.device,
        channels_last: bool = False,
        domain_of: Mapping[int, int] = MappingProxyType({}),  # of each client, where clients hold one domain each
    ) -> None:
        self.dataset = dataset
        self.parts = parts
        self.store = Store(dataset.x, dataset.y, device, channels_last)
        self._fractions = fractions
        self._seed = seed
        self._domain_of = dict(domain_of)
        self._common = common_test(dataset, fractions, seed)
        self._derive()
        self._identity_parts = self._split_identities()

    def _derive(self) -> None:
        self._labels = self.dataset.y.numpy()
        self.rows = lru_cache(maxsize=4096)(self._rows)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what other processes derive again: a cache cannot be pickled, a numpy view would be copied."""
        return {name: value for name, value in vars(self).items() if name not in ("_labels", "rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._derive()

    def _split_identities(self) -> dict[str, np.ndarray] | None:
        """Put copies of an image, such as rotations, into the same part for all clients: no test image may leak."""
        if self.dataset.identity is None:
            return None
        identity, labels = self.dataset.identity.numpy(), self._labels
        if self._common is not None and self._fractions.test_on == "common":
            identity, labels = np.delete(identity, self._common), np.delete(labels, self._common)
        identities, first = np.unique(identity, return_index=True)
        cut = split(labels[first], self._fractions.shares(), numpy_rng(self._seed, "split"))
        return {name: identities[positions] for name, positions in cut.items()}

    def _rows(self, client: int) -> dict[str, Tensor]:
        held = self.parts[client]
        if self._identity_parts is not None and self.dataset.identity is not None:
            identity = self.dataset.identity.numpy()[held]
            cut = {name: held[np.isin(identity, ids)] for name, ids in self._identity_parts.items()}
        elif self.dataset.part is not None:
            cut = self._fixed_split(client, self.dataset.part.numpy()[held])
        else:
            positions = split(self._labels[held], self._fractions.shares(), numpy_rng(self._seed, "split", client))
            cut = {name: held[at] for name, at in positions.items()}
        if self._common is not None:
            cut["test"] = self._common
        return {name: torch.from_numpy(rows) for name, rows in cut.items()}

    def _fixed_split(self, client: int, part: np.ndarray) -> dict[str, np.ndarray]:
        """The data set's own split. Public rows are a share of the test part, and are not tested on."""
        held = self.parts[client]
        cut = {name: held[part == number] for number, name in enumerate(PARTS)}
        shares = {"test": 1.0 - self._fractions.public, "public": self._fractions.public}
        positions = split(self._labels[cut["test"]], shares, numpy_rng(self._seed, "split", client))
        return cut | {name: cut["test"][at] for name, at in positions.items()}

    def sets(self, client: int) -> dict[str, Data]:
        device = self.store.y.device
        return {name: Data(self.store, rows.to(device)) for name, rows in self.rows(client).items()}

    def samples(self, client: int) -> int:
        """Size of the client's training set, n_k."""
        return len(self.rows(client)["train"])

    def test_samples(self, client: int) -> int:
        return len(self.rows(client)["test"])

    def counts(self, client: int) -> list[int]:
        """Training samples per class."""
        labels = self._labels[self.rows(client)["train"].numpy()]
        return [int(count) for count in np.bincount(labels, minlength=len(self.dataset.classes))]

    @cached_property
    def public(self) -> dict[int, Data]:
        """The public set of every client, which all clients know. Empty: there is no public fraction."""
        if not self._fractions.public:
            return {}
        return {k: self.sets(k)["public"] for k in range(len(self.parts))}

    @cached_property
    def exams(self) -> ExamSets:
        """Per domain, the union of its clients' val and test sets, or its part of a common test set."""
        if not self._domain_of:
            return {}
        device = self.store.y.device
        exams: dict[str, dict[str, Data]] = {}
        for number, name in enumerate(self.dataset.domains):
            members = [k for k, d in self._domain_of.items() if d == number]
            rows = {s: torch.cat([self.rows(k)[s] for k in members]).to(device) for s in ("val", "test")}
            if self._common is not None and self.dataset.domain is not None:
                common = torch.from_numpy(self._common)
                rows["test"] = common[self.dataset.domain[common] == number].to(device)
            exams[name] = {s: Data(self.store, r) for s, r in rows.items()}
        return exams

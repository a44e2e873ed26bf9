"""One data set, divided among many clients: a store on the device, and row numbers into it.

A client's sets are row numbers. They are computed on first use, so that ten thousand clients cost nothing until they
participate. Rows are stored as they are given. `take` normalizes them: the bytes of images become numbers in [-1, 1],
unless a `Scale` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from pluribus.data.augment import Augment
from pluribus.data.dataset import PARTS, UNLABELED, Dataset
from pluribus.data.scaling import AS_IT_IS, Normalize, Scale, choose_normalize, measure, measure_rows
from pluribus.data.split import split, split_by_time, split_groups
from pluribus.draws import numpy_rng
from pluribus.errors import MismatchError


class Store:
    """All rows and targets of an experiment, on the device."""

    resident = True

    def __init__(self, x: Tensor, y: Tensor, device: torch.device, channels_last: bool = False) -> None:
        self.device = device
        self.x = x.to(device)
        self.y = y.to(device)
        self._layout = torch.channels_last if channels_last and x.dim() == 4 else torch.contiguous_format

    def take(self, rows: Tensor, augment: Augment | None = None, scale: Scale | None = None) -> tuple[Tensor, Tensor]:
        """These rows as a model gets them, and their targets."""
        return self.finish(self.x[rows], self.y[rows], augment, scale)

    def finish(
        self, x: Tensor, y: Tensor, augment: Augment | None = None, scale: Scale | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows and targets as a model gets them, from how they are stored."""
        if scale is not None:
            x = scale(x.to(torch.float32))
        elif x.dtype == torch.uint8:
            x = x.to(torch.float32).mul_(1 / 127.5).sub_(1.0)
        elif x.dtype == torch.float16:
            x = x.to(torch.float32)
        elif x.dtype == torch.int32:
            x = x.to(torch.int64)
        if augment is not None:
            x = augment(x)
        return x.contiguous(memory_format=self._layout), _as_target(y)

    def labels(self, rows: Tensor) -> Tensor:
        return _as_target(self.y[rows])

    @property
    def index_device(self) -> torch.device:
        """Where row numbers are kept."""
        return self.x.device


def _as_target(y: Tensor) -> Tensor:
    return y.to(torch.float32) if y.dtype == torch.uint8 else y


@dataclass(frozen=True)
class Data:
    """Some rows of the store, and how they are normalized."""

    store: Store
    rows: Tensor
    scale: Scale | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: Tensor | slice) -> Data:
        """The samples at these positions of the set, in this order."""
        if isinstance(positions, Tensor):
            positions = positions.to(self.rows.device)
        elif not isinstance(positions, slice):
            raise TypeError(f"a set is indexed by a tensor of positions or a slice, not by {type(positions).__name__}")
        return Data(self.store, self.rows[positions], self.scale)

    def __add__(self, other: Data) -> Data:
        """The samples of this set, then those of another set of the same store."""
        return Data.join([self, other]) if isinstance(other, Data) else NotImplemented

    @staticmethod
    def join(sets: Iterable[Data]) -> Data:
        """All samples of some sets of one store, set after set."""
        first, *others = sets
        if any(other.store is not first.store for other in others):
            raise ValueError("sets of two stores cannot be joined")
        return Data(first.store, torch.cat([first.rows, *(other.rows for other in others)]), first.scale)

    def take(self, positions: Tensor, augment: Augment | None = None) -> tuple[Tensor, Tensor]:
        """Rows and targets at these positions of the set, as a model gets them."""
        return self.store.take(self.rows[positions.to(self.rows.device)], augment, self.scale)

    def labels(self) -> Tensor:
        return self.store.labels(self.rows)


ExamSets = Mapping[str, Mapping[str, Data]]  # domain -> `val` and `test`


class ClientSets(Protocol):
    """The rows that are with clients: the sets of each, and those that all of them know."""

    def sets(self, client: int) -> dict[str, Data]:
        """The client's `train`, `val`, `test` and `public` sets."""

    def public_for(self, client: int) -> Mapping[int, Data]:
        """Every client's public set, by owner, as this client normalizes it."""

    def exams_for(self, client: int) -> ExamSets:
        """The val and test sets of every domain, where there are domains, as this client normalizes them."""


class Rescaled(Mapping[Any, Data]):
    """Sets with another scale, made on demand: those of ten thousand owners cost nothing until they are read."""

    def __init__(self, sets: Mapping[Any, Data], scale: Scale) -> None:
        self._sets, self._scale = sets, scale

    def __getitem__(self, key: Any) -> Data:
        return replace(self._sets[key], scale=self._scale)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sets)

    def __len__(self) -> int:
        return len(self._sets)


SplitBy = Literal["auto", "rows", "group", "time"]


@dataclass(frozen=True)
class Fractions:
    """Split of a client's rows. `test_on`: whether it is tested on its own rows or on rows that no client holds. `by`:
    whether rows are split one by one, in groups, or by time."""

    val: float = 0.1
    test: float = 0.2
    public: float = 0.0
    test_on: Literal["own", "official", "common"] = "own"
    by: SplitBy = "auto"

    def way(self, dataset: Dataset) -> SplitBy:
        """How the rows of a data set are split. By default signals by time, and others in groups, if they have them."""
        if self.by == "auto":
            if dataset.kind == "signal" and dataset.time is not None:
                return "time"
            return "rows" if dataset.group is None else "group"
        if self.by != "rows" and getattr(dataset, self.by) is None:
            raise MismatchError(
                f"--split-by {self.by} needs data with a column '{self.by}', but {dataset.name} has none: name it in "
                f"--columns, or leave out --split-by."
            )
        return self.by

    def shares(self) -> dict[str, float]:
        """Fractions of a client's rows, training first. They sum to one."""
        test = self.test if self.test_on == "own" else 0.0
        return {"train": 1.0 - self.val - test - self.public, "val": self.val, "test": test, "public": self.public}


def split_rows(
    dataset: Dataset, held: np.ndarray, fractions: Fractions, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Positions of each part in some rows: row by row, group by group, or in the order of time."""
    shares, way, labels = fractions.shares(), fractions.way(dataset), dataset.strata.numpy()[held]
    group, time = (None if one is None else one.numpy()[held] for one in (dataset.group, dataset.time))
    if way == "time" and time is not None:
        in_time = {name: shares[name] for name in ("train", "public", "val", "test")}  # the last rows test
        return split_by_time(time, in_time, group, dataset.span)
    if way == "group" and group is not None:
        return split_groups(labels, shares, group, rng)
    return split(labels, shares, rng)


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
    strata, shares = dataset.strata.numpy(), {"held": 1 - share, "test": share}
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
        normalize: Normalize = AS_IT_IS,
        foreign: Dataset | None = None,  # public rows from another data set
        store: Callable[..., Store] = Store,
    ) -> None:
        self.dataset = dataset
        self.parts = parts
        self._foreign = 0 if foreign is None else len(foreign.y)
        self.public_labels = foreign is None or have_same_targets(dataset, foreign)
        x, y = (dataset.x, dataset.y) if foreign is None else _append(dataset, foreign)
        self.store = store(x, y, device, channels_last)
        self.device = device
        self._fractions = fractions
        self.split_by = fractions.way(dataset)
        self._normalize = choose_normalize(normalize, dataset)
        self._seed = seed
        self._domain_of = dict(domain_of)
        self._common = common_test(dataset, fractions, seed)
        self._derive()
        self._identity_parts = self._split_identities()
        self._fixed: Scale | None = None
        if self._normalize.mode == "given":
            self._fixed = self._normalize.given(dataset)
        elif self._normalize.mode == "dataset":
            trained = [self.rows(k)["train"].numpy() for k in range(len(parts))]
            self._fixed = measure(dataset, np.concatenate(trained))

    def _derive(self) -> None:
        self._labels = self.dataset.strata.numpy()
        self.rows = lru_cache(maxsize=4096)(self._rows)
        self._scale = lru_cache(maxsize=4096)(self._find_scale)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what other processes derive again: a cache cannot be pickled, a numpy view would be copied."""
        return {name: value for name, value in vars(self).items() if name not in ("_labels", "rows", "_scale")}

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
            rng = numpy_rng(self._seed, "split", client)
            cut = {name: held[at] for name, at in split_rows(self.dataset, held, self._fractions, rng).items()}
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
        device, scale = self.store.index_device, self._scale(client)
        own = {name: Data(self.store, rows.to(device), scale) for name, rows in self.rows(client).items()}
        return own | ({"public": replace(self.public[client], scale=scale)} if self._foreign else {})

    def flip_labels(self, clients: Iterable[int]) -> None:
        """Give these clients wrong labels to train on: class c becomes the class of C - 1 - c, a label its opposite."""
        y = self.store.y.clone()
        last = len(self.dataset.classes) - 1 if self.dataset.target == "classes" else 1
        for k in clients:
            rows = self.rows(k)["train"].to(y.device)
            y[rows] = last - y[rows]
        self.store.y = y

    def _find_scale(self, client: int) -> Scale | None:
        """How the client's rows are normalized, on the device."""
        if self._fixed is None and not self._normalize.by_client:
            return None
        return (self._fixed or measure(self.dataset, self.rows(client)["train"].numpy())).to(self.device)

    def public_for(self, client: int) -> Mapping[int, Data]:
        return self.public if (scale := self._scale(client)) is None else Rescaled(self.public, scale)

    def public_at_server(self) -> Data:
        """The public sets of all clients together, as the server normalizes them: by themselves, if clients do so."""
        rows = Data.join(self.public.values())
        scale = self._fixed
        if self._normalize.by_client and len(rows):
            scale = measure_rows(self.store.x[rows.rows], self.dataset)
        return replace(rows, scale=None if scale is None else scale.to(self.device))

    def exams_for(self, client: int) -> ExamSets:
        if (scale := self._scale(client)) is None:
            return self.exams
        return {domain: Rescaled(sets, scale) for domain, sets in self.exams.items()}

    def scale_of(self, client: int) -> Scale | None:
        """How a client's rows are normalized; None: not at all, except that the bytes of images become [-1, 1]."""
        scale = self._scale(client)
        return None if scale is None else scale.to(torch.device("cpu"))

    @property
    def tests_on_own(self) -> bool:
        """Whether each client is tested on rows that it holds."""
        return self._common is None

    @property
    def normalization(self) -> Normalize:
        return self._normalize

    def samples(self, client: int) -> int:
        """Size of the client's training set, n_k."""
        return len(self.rows(client)["train"])

    def test_samples(self, client: int) -> int:
        return len(self.rows(client)["test"])

    def counts(self, client: int) -> list[int]:
        """Training samples per class. If nothing is classified, the number of training samples alone."""
        labels = self._labels[self.rows(client)["train"].numpy()]
        classes = len(self.dataset.classes) if self.dataset.target == "classes" else 1
        return [int(count) for count in np.bincount(labels, minlength=classes)]

    @cached_property
    def public(self) -> dict[int, Data]:
        """The public set of every client, which all clients know. Empty: there is no public fraction."""
        device, clients = self.store.index_device, len(self.parts)
        if self._foreign:  # clients own equal shares of the rows, in order
            first = len(self.dataset.y)
            ends = [first + self._foreign * k // clients for k in range(clients + 1)]
            return {k: Data(self.store, torch.arange(*ends[k : k + 2], device=device)) for k in range(clients)}
        if not self._fractions.public:
            return {}
        return {k: Data(self.store, self.rows(k)["public"].to(device)) for k in range(clients)}

    @cached_property
    def exams(self) -> ExamSets:
        """Per domain, the union of its clients' val and test sets, or its part of a common test set."""
        if not self._domain_of:
            return {}
        device = self.store.index_device
        exams: dict[str, dict[str, Data]] = {}
        for number, name in enumerate(self.dataset.domains):
            members = [k for k, d in self._domain_of.items() if d == number]
            rows = {s: torch.cat([self.rows(k)[s] for k in members]).to(device) for s in ("val", "test")}
            if self._common is not None and self.dataset.domain is not None:
                common = torch.from_numpy(self._common)
                rows["test"] = common[self.dataset.domain[common] == number].to(device)
            exams[name] = {s: Data(self.store, r) for s, r in rows.items()}
        return exams


def have_same_targets(dataset: Dataset, foreign: Dataset) -> bool:
    """Whether the labels of another data set mean the same."""
    return foreign.classes == dataset.classes and foreign.target == dataset.target


def _append(dataset: Dataset, foreign: Dataset) -> tuple[Tensor, Tensor]:
    """The rows of a data set and then the public rows of another one, whose form must be the same."""
    named = bool(foreign.columns and dataset.columns)  # arrays have no names
    differ = foreign.categories != dataset.categories or (named and foreign.columns != dataset.columns)
    if differ and foreign.input == dataset.input:
        raise MismatchError(
            f"--public-data must have the columns and categories of --data, but those of {foreign.name} and "
            f"{dataset.name} differ."
        )
    if foreign.input != dataset.input or foreign.x.dtype != dataset.x.dtype:
        kinds = [
            f"{one.name} has {one.input} ({str(one.x.dtype).removeprefix('torch.')})" for one in (dataset, foreign)
        ]
        raise MismatchError(f"--public-data must have rows of the form of --data, but {' and '.join(kinds)}.")
    y = (
        foreign.y
        if have_same_targets(dataset, foreign)
        else torch.full((len(foreign.y), *dataset.y.shape[1:]), UNLABELED, dtype=torch.int64)
    )
    return torch.cat([dataset.x, foreign.x]), torch.cat([dataset.y, y.to(dataset.y.dtype)])

"""The data of a site: its own rows, and the public rows that all sites have, as the federation has agreed on them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pluribus.data import Dataset, load
from pluribus.data.federated import Data, ExamSets
from pluribus.data.folders import normalize_name
from pluribus.data.host_store import make_store
from pluribus.data.npz import read_arrays
from pluribus.data.reading import DEFAULT, Reading
from pluribus.data.scaling import AS_IT_IS, Normalize, Scale, choose_normalize, measure
from pluribus.errors import AgreementError, DamagedDataError, DataError
from pluribus.inputs import Input
from pluribus.internal.paths import to_path
from pluribus.sites.agreement import Agreement
from pluribus.targets import IN_WORDS

OWN = ("train", "val", "test")
OWNER = "owner"  # the column of an npz file


@dataclass(frozen=True)
class Public:
    """Rows that every site has before the first round, and their owners."""

    dataset: Dataset
    owner: Tensor | None = None
    """(N,) int64: the client that owns a row. None: clients own equal shares of the rows, in order."""

    @classmethod
    def read(cls, path: str, image_size: int | None, reading: Reading = DEFAULT) -> Public:
        """Read anything that `load` can read. An npz file may have a column `owner` with the owner of each row."""
        dataset, file = load(path, image_size=image_size, reading=reading), to_path(path)
        columns = read_arrays(file, [OWNER]) if file.suffix == ".npz" and file.is_file() else {}
        if OWNER not in columns:
            return cls(dataset)
        column, rows = columns[OWNER], len(dataset.y)
        if column.shape != (rows,) or not np.issubdtype(column.dtype, np.integer):
            raise DamagedDataError(
                f"{file} cannot be used: {OWNER} must be a row of {rows} integers, one client number per row, "
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
                f"the public rows have owners from {low} to {high}, but this federation has {clients} clients: "
                f"owners must be in 0..{clients - 1}."
            )
        return self.owner

    def sizes(self, clients: int) -> tuple[int, ...]:
        return tuple(self.owners(clients).bincount(minlength=clients).tolist())

    def digest(self, clients: int) -> str:
        """A hash of rows, labels and owners, in order."""
        found = hashlib.sha256()
        for column in (self.dataset.x, self.dataset.y, self.owners(clients)):
            found.update(column.contiguous().numpy().tobytes())
        return found.hexdigest()


def take_part(dataset: Dataset, rows: np.ndarray, name: str) -> Dataset:
    """Some rows of a data set, without what only a split or a partition needs."""
    unused: dict[str, Any] = dict.fromkeys(("official", "domain", "identity", "part", "client", "group", "time"))
    unused |= {"domains": (), "clients": ()}
    chosen = torch.from_numpy(rows)
    return dataclasses.replace(dataset, name=name, x=dataset.x[chosen], y=dataset.y[chosen], **unused)


def fit(dataset: Dataset, agreement: Agreement, which: str = "") -> Dataset:
    """The rows as the federation has agreed on them: columns, categories and classes by their names.

    Rows of another form are refused. `which` is "public " for public rows.
    """
    dataset = _arrange(dataset, agreement, which)
    if dataset.input != agreement.input:
        there, here = map(_describe, (agreement.input, dataset.input))
        raise AgreementError(f"the federation has {there}, but the {which}data of this site are {here}.")
    if dataset.target != agreement.target.kind:
        there, here = IN_WORDS[agreement.target.kind], IN_WORDS[dataset.target]
        raise AgreementError(
            f"the federation predicts {there}, but the {which}data of this site have {here}: see 'label_kind' in "
            f"site.toml."
        )
    # a site may lack classes and labels, but have no others; public rows have the same ones at all sites
    ours, theirs = (tuple(map(normalize_name, names)) for names in (dataset.classes, agreement.classes))
    are_known = set(ours) <= set(theirs) if dataset.target != "numbers" else set(ours) == set(theirs)
    if not (ours == theirs if which else are_known):
        raise AgreementError(
            f"the label space differs: the federation has {', '.join(agreement.classes)}; this site has "
            f"{', '.join(dataset.classes)}{which and ' in its public rows'}."
        )
    return relabel(dataset, agreement.classes)


def relabel(dataset: Dataset, classes: tuple[str, ...]) -> Dataset:
    """Change labels to indices into these classes, by name. The data set may lack some of them."""
    known = [normalize_name(name) for name in classes]
    numbers = torch.tensor([known.index(normalize_name(name)) for name in dataset.classes])
    if dataset.target == "classes":
        y = numbers[dataset.y]
    else:
        y = dataset.y.new_zeros(len(dataset.y), len(classes))
        y[:, numbers] = dataset.y
    return dataclasses.replace(dataset, y=y, classes=classes)


def _describe(rows: Input) -> str:
    """The form of rows, with all that may differ."""
    words = f" with a vocabulary of {rows.vocabulary}" if rows.vocabulary else ""
    return f"{rows}{words}{' of whole numbers' if rows.whole else ''}"


def _arrange(dataset: Dataset, agreement: Agreement, which: str) -> Dataset:
    """The columns of a table or channels of signals in the agreed order, with the agreed numbers of categories."""
    agreed = agreement.columns
    if dataset.kind not in ("table", "signal") or not (agreed or dataset.categories):
        return dataset
    if not agreed:
        raise AgreementError(
            f"the {which}table of this site has categories, but the federation lists no values of them: name columns "
            f"and values under [input] in federation.toml."
        )
    if not dataset.columns:
        if agreement.categories or dataset.categories:
            raise AgreementError(
                f"the columns of the {which}table of this site have no names: the categories need them."
            )
        return dataset
    ours = set(dataset.columns)
    if ours != set(agreed):
        raise AgreementError(
            f"the federation has the columns {', '.join(agreed)}, but the {which}data of this site have "
            f"{', '.join(dataset.columns)}: name the others as 'ignore' under 'columns' in site.toml."
        )
    first = len(agreed) - len(agreement.categories)
    columns = [_numbers_of(dataset, name) for name in agreed[:first]]
    for name, values in zip(agreed[first:], agreement.categories, strict=True):
        columns.append(_codes_of(dataset, name, values))
    x = torch.stack(columns, dim=1)
    return dataclasses.replace(dataset, x=x, columns=agreed, categories=agreement.categories)


def _values_of(dataset: Dataset, name: str) -> tuple[Tensor, tuple[str, ...] | None]:
    """A column of a table, and its values if it is a category."""
    number = dataset.columns.index(name)
    first = len(dataset.columns) - len(dataset.categories)
    return dataset.x[:, number], None if number < first else dataset.categories[number - first]


def _numbers_of(dataset: Dataset, name: str) -> Tensor:
    column, values = _values_of(dataset, name)
    if values is not None:
        raise AgreementError(
            f"column '{name}' holds numbers in the federation, but at this site values such as '{values[0]}'."
        )
    return column


def _codes_of(dataset: Dataset, name: str, agreed: tuple[str, ...]) -> Tensor:
    """The values of a category as their numbers in the federation. Numbers of a file count as their text."""
    column, values = _values_of(dataset, name)
    codes = {value: number for number, value in enumerate(agreed)}
    found, inverse = torch.unique(column, return_inverse=True)
    texts = [f"{one:g}" if values is None else values[int(one)] for one in found.tolist()]
    for position, text in enumerate(texts):
        if text not in codes:
            row = int((inverse == position).nonzero()[0])
            raise DataError(
                f"row {row} of {dataset.name} has '{text}' in column '{name}', but the federation knows only "
                f"{', '.join(agreed)}."
            )
    return torch.tensor([float(codes[text]) for text in texts])[inverse]


def find_scale(train: Dataset, normalize: Normalize) -> Scale | None:
    """How a site normalizes its rows: by its own training rows, unless site.toml says otherwise."""
    chosen, rows = choose_normalize(normalize, train), np.arange(len(train.y))
    if chosen.mode == "none":
        return None
    return chosen.given(train) if chosen.mode == "given" else measure(train, rows)


class Holdings:
    """The sets of the one client of a site, and the public sets, in one store. `val` and `test` may be missing."""

    def __init__(
        self,
        own: Mapping[str, Dataset],
        public: Public | None,
        clients: int,
        device: torch.device,
        normalize: Normalize = AS_IT_IS,
    ) -> None:
        given = [own[name] for name in OWN if name in own] + ([public.dataset] if public else [])
        if len({one.x.dtype for one in given}) > 1:
            kinds = ", ".join(f"{one.name} {str(one.x.dtype).removeprefix('torch.')}" for one in given)
            raise DataError(f"all sets of a site must hold the same type of numbers, but they are {kinds}.")
        x, y = torch.cat([one.x for one in given]), torch.cat([one.y for one in given])
        self._store = make_store(x, y, device, channels_last=False, where="auto")
        sizes = [len(own[name].y) if name in own else 0 for name in OWN]
        ends = np.cumsum(sizes).tolist()
        self._rows = {name: torch.arange(end - size, end) for name, size, end in zip(OWN, sizes, ends, strict=True)}
        self.scale = find_scale(own["train"], normalize)
        self._scale = None if self.scale is None else self.scale.to(device)
        owners = public.owners(clients) if public else None
        owned = {} if owners is None else {k: (owners == k).nonzero().flatten() for k in range(clients)}
        self.public = {k: self._data(ends[-1] + rows) for k, rows in owned.items()}

    def sets(self, client: int) -> dict[str, Data]:
        own = {name: self._data(rows) for name, rows in self._rows.items()}
        return own | {"public": self.public.get(client, self._data(torch.arange(0)))}

    def public_for(self, client: int) -> Mapping[int, Data]:
        return self.public

    def exams_for(self, client: int) -> ExamSets:
        return MappingProxyType({})  # real sites have no domains

    def _data(self, rows: Tensor) -> Data:
        return Data(self._store, rows.to(self._store.index_device), self._scale)

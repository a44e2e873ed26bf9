"""`pluribus data check`: the content of a data set, and what reading changes in it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from pluribus.data.dataset import PARTS, Dataset
from pluribus.data.datasets import load
from pluribus.data.domains import find_image_folder
from pluribus.data.files import is_sheet, peek_names
from pluribus.data.folders import ImageLabels, read_layout
from pluribus.data.hub import PREFIX, hub_columns
from pluribus.data.images import Picture, count_events, decode, path_text, picture_notes
from pluribus.data.reading import DEFAULT, Reading, parse_columns
from pluribus.data.roles import find_roles
from pluribus.errors import DataError
from pluribus.inputs import PADDING
from pluribus.internal.paths import to_path
from pluribus.targets import TargetKind

SMALL = (3, 1, 1)  # the smallest shape, because the check does not keep pixels


@dataclass(frozen=True)
class Skipped:
    """Number of files of one kind that are not read, and an example."""

    files: int
    example: str


@dataclass(frozen=True)
class Duplicates:
    """Images with the same bytes as an earlier image."""

    images: int = 0
    across_splits: int = 0  # those with a copy in another split, such as a test image that is also a training image
    across_classes: int = 0  # those with a copy that has another label
    example: tuple[str, str] | None = None


@dataclass(frozen=True)
class DataCheck:
    """The content of a data set, and what reading changes in it.

    >>> check_data("digits").images
    1797
    """

    path: str
    images: int  # number of images that can be read, or rows of another kind
    counts: dict[ImageLabels, int]  # images by class, domain and split
    shapes: dict[str, int]  # images by height x width, before they are resized
    modes: dict[str, int]  # images by channels and depth, as in the files
    skipped: dict[str, Skipped] = field(default_factory=dict)  # files that are not read, by suffix
    merged: dict[str, list[str]] = field(default_factory=dict)
    """Class and domain names with several spellings, and the spellings."""
    happened: dict[str, int] = field(default_factory=lambda: count_events([]))
    """Number of images that are scaled, rotated, and so on."""
    duplicates: Duplicates = Duplicates()
    unreadable: dict[str, str] = field(default_factory=dict)  # files that cannot be read, and the reason
    notes: tuple[str, ...] = ()  # warnings that a run would print
    facts: dict[str, Any] = field(default_factory=dict)  # of rows in memory, not of a folder: see `describe_rows`

    @property
    def problem(self) -> str | None:
        """Why a run cannot read the data set. None: it can."""
        if not self.unreadable:
            return None
        number = len(self.unreadable)
        return f"{number} of {number + self.images} images of {self.path} cannot be read: repair or delete them."

    def to_json(self) -> dict[str, Any]:
        counts = [
            {"class": one.label, "domain": one.domain or None, "split": one.split or None, "images": number}
            for one, number in self.counts.items()
        ]
        return {
            "path": self.path,
            "images": self.images,
            "counts": counts,
            "shapes": self.shapes,
            "modes": self.modes,
            "facts": self.facts,
            "skipped": {kind: asdict(one) for kind, one in self.skipped.items()},
            "merged": self.merged,
            **self.happened,
            "duplicates": asdict(self.duplicates),
            "unreadable": self.unreadable,
            "notes": list(self.notes),
            "error": self.problem,
        }


def check_data(
    path: str | Path,
    *,
    columns: str | Mapping[str, Any] = "",
    label_kind: TargetKind | Literal["auto"] = "auto",
    window: int | None = None,
    stride: int | None = None,
    tokenizer: str = DEFAULT.tokenizer,
    vocabulary: int = DEFAULT.vocabulary,
    length: int | None = None,
) -> DataCheck:
    """Check all rows of a folder, of a file or of a data set by name. The settings are those of a run.

    What cannot be read at all raises the same error as in a run. Image files that cannot be read are all listed.
    """
    reading = Reading(parse_columns(columns), window, stride, tokenizer, vocabulary, length, label_kind)
    folder = find_image_folder(str(path))
    if folder is not None and reading == DEFAULT:
        return _check_folder(str(path), folder)
    found = check_dataset(str(path), load(str(path), reading=reading))
    names = _column_names(str(path))
    roles = find_roles(names, str(path), reading).table() if names else {}
    return replace(found, facts=found.facts | ({"roles": roles} if roles else {}))


def _column_names(path: str) -> Sequence[str]:
    """The columns that have roles: those of a file, or of a data set of Hugging Face without images."""
    if path.startswith(PREFIX):
        return hub_columns(path)
    found = to_path(path)
    return peek_names(found) if is_sheet(found) else ()


def _check_folder(path: str, folder: Path) -> DataCheck:
    layout = read_layout(folder)
    with ThreadPoolExecutor() as pool:
        results = dict(zip(layout.files, pool.map(_inspect, layout.files), strict=True))
    seen = {file: one for file, one in results.items() if not isinstance(one, DataError)}
    places = [place for file, place in zip(layout.files, layout.places, strict=True) if file in seen]
    pictures, digests = [picture for picture, _ in seen.values()], [digest for _, digest in seen.values()]
    return DataCheck(
        path=path,
        images=len(seen),
        counts=dict(Counter(places)),
        shapes=dict(Counter(f"{one.height} x {one.width}" for one in pictures).most_common()),
        modes=dict(Counter(f"{one.mode}, {one.bits} bit" for one in pictures).most_common()),
        skipped={kind: Skipped(len(those), path_text(those[0], folder)) for kind, those in layout.skipped.items()},
        merged=layout.merged,
        happened=count_events(pictures),
        duplicates=_duplicates(digests, places, [path_text(file, folder) for file in seen]),
        unreadable={path_text(file): one.sentence for file, one in results.items() if isinstance(one, DataError)},
        notes=(*layout.notes(), *picture_notes(list(seen), pictures, folder), *_class_notes(layout.places)),
    )


def _inspect(file: Path) -> tuple[Picture, str] | DataError:
    try:
        return decode(file, SMALL)[1], hashlib.sha256(file.read_bytes()).hexdigest()
    except DataError as refusal:
        return refusal


def _class_notes(places: Sequence[ImageLabels]) -> list[str]:
    labels = {place.label for place in places}
    return [] if len(labels) > 1 else [f"all images have one class, {labels.pop()}: a simulation needs two classes."]


def check_dataset(path: str, dataset: Dataset) -> DataCheck:
    """Check a data set in memory. `path` is its name in the report."""
    rows, (channels, *size) = len(dataset.y), dataset.x.shape[1:]
    domains = [""] * rows if dataset.domain is None else [dataset.domains[d] for d in dataset.domain.tolist()]
    labels = [dataset.classes[y] for y in dataset.y.tolist()] if dataset.target == "classes" else [""] * rows
    places = [ImageLabels(*one) for one in zip(labels, domains, _splits(dataset), strict=True)]
    digests = [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in dataset.x]
    depth = "8 bit" if dataset.x.dtype == torch.uint8 else _type(dataset)
    if dataset.kind == "image":
        shape, mode = " x ".join(map(str, size)), f"{channels} channel{'s' if channels > 1 else ''}, {depth}"
    else:
        shape, mode = " x ".join(map(str, (channels, *size))), depth
    return DataCheck(
        path=path,
        images=rows,
        counts=dict(Counter(places)) if dataset.target == "classes" else _count_labels(dataset),
        shapes={shape: rows},
        modes={mode: rows},
        duplicates=_duplicates(digests, places, [f"row {row}" for row in range(rows)]),
        notes=dataset.notes,
        facts=describe_rows(dataset),
    )


def describe_rows(dataset: Dataset) -> dict[str, Any]:
    """What rows of any kind are, what is predicted, who holds them and when they were recorded."""
    found: dict[str, Any] = {"kind": dataset.kind, "shape": [*dataset.x.shape[1:]], "dtype": _type(dataset)}
    found["target"] = dataset.target
    if dataset.target == "numbers":
        for name, column in zip(dataset.classes, dataset.y.double().T, strict=True):
            numbers = {"mean": float(column.mean()), "min": float(column.min()), "max": float(column.max())}
            found.setdefault("numbers", {})[name] = numbers
    if dataset.kind == "tokens":
        lengths = (dataset.x != PADDING).sum(1)
        found |= {"vocabulary": dataset.vocabulary, "tokens": [int(lengths.min()), int(lengths.max())]}
    if dataset.columns:
        found["columns"] = [*dataset.columns]
    if dataset.client is not None:
        held = torch.bincount(dataset.client, minlength=len(dataset.clients)).tolist()
        found["clients"] = dict(zip(dataset.clients, held, strict=True))
        if alone := _labels_of_one(dataset):
            found["labels_of_one_client"] = alone
    if dataset.group is not None:
        found["groups"] = len(set(dataset.group.tolist()))
    if dataset.time is not None:
        found |= {"time": [float(dataset.time.min()), float(dataset.time.max())], "span": dataset.span}
    return found


def _labels_of_one(dataset: Dataset) -> dict[str, str]:
    """Classes that only one of several clients has rows of, and that client."""
    if dataset.target != "classes" or dataset.client is None or len(dataset.clients) < 2:
        return {}
    pairs = torch.unique(torch.stack([dataset.y, dataset.client]), dim=1)
    holders = torch.bincount(pairs[0], minlength=len(dataset.classes))
    return {dataset.classes[y]: dataset.clients[client] for y, client in pairs.T.tolist() if holders[y] == 1}


def _type(dataset: Dataset) -> str:
    return str(dataset.x.dtype).removeprefix("torch.")


def _splits(dataset: Dataset) -> list[str]:
    rows = len(dataset.y)
    if dataset.part is not None:
        return [PARTS[part] for part in dataset.part.tolist()]
    if dataset.official is None:
        return [""] * rows
    return ["train"] * dataset.official + ["test"] * (rows - dataset.official)


def _count_labels(dataset: Dataset) -> dict[ImageLabels, int]:
    """Rows that have each label. Numbers to predict have none."""
    if dataset.target == "numbers":
        return {}
    return {ImageLabels(name): int(n) for name, n in zip(dataset.classes, dataset.y.sum(0), strict=True)}


def _duplicates(digests: Sequence[str], places: Sequence[ImageLabels], names: Sequence[str]) -> Duplicates:
    copies: dict[str, list[int]] = defaultdict(list)
    for at, digest in enumerate(digests):
        copies[digest].append(at)
    groups = [group for group in copies.values() if len(group) > 1]
    if not groups:
        return Duplicates()
    apart = {
        which: [group for group in groups if len({getattr(places[at], which) for at in group}) > 1]
        for which in ("split", "label")
    }
    worst = (apart["split"] or apart["label"] or groups)[0]
    other = next((at for at in worst if places[at] != places[worst[0]]), worst[1])
    images, splits, classes = (sum(len(group) - 1 for group in those) for those in (groups, *apart.values()))
    return Duplicates(images, splits, classes, example=(names[worst[0]], names[other]))

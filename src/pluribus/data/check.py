"""`pluribus data check`: the content of a data set, and what reading changes in it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pluribus.data.dataset import Dataset
from pluribus.data.datasets import load
from pluribus.data.domains import folder_of
from pluribus.data.folders import Layout, Place, read_layout
from pluribus.data.images import Picture, decode, happened, picture_notes, shown
from pluribus.errors import DataError

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
    across_splits: int = 0
    """Those with a copy in another split, such as a test image that is also a training image."""
    across_classes: int = 0
    """Those with a copy that has another label."""
    example: tuple[str, str] | None = None


@dataclass(frozen=True)
class DataCheck:
    """The content of a data set, and what reading changes in it.

    >>> check_data("digits").images
    1797
    """

    path: str
    images: int
    """Number of images that can be read."""
    counts: dict[Place, int]
    """Images by class, domain and split."""
    shapes: dict[str, int]
    """Images by height x width, before they are resized."""
    modes: dict[str, int]
    """Images by channels and depth, as in the files."""
    skipped: dict[str, Skipped] = field(default_factory=dict)
    """Files that are not read, by suffix."""
    merged: dict[str, list[str]] = field(default_factory=dict)
    """Class and domain names with several spellings, and the spellings."""
    happened: dict[str, int] = field(default_factory=lambda: happened([]))
    """Number of images that are scaled, rotated, and so on."""
    duplicates: Duplicates = Duplicates()
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files that cannot be read, and the reason."""
    notes: tuple[str, ...] = ()
    """Warnings that a run would print."""

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
            "skipped": {kind: asdict(one) for kind, one in self.skipped.items()},
            "merged": self.merged,
            **self.happened,
            "duplicates": asdict(self.duplicates),
            "unreadable": self.unreadable,
            "notes": list(self.notes),
            "error": self.problem,
        }


def check_data(path: str | Path) -> DataCheck:
    """Check all images of a folder, an `.npz` file or a data set by name.

    A layout that cannot be read raises the same error as in a run. Files that cannot be read are all listed.
    """
    folder = folder_of(str(path))
    return _check_dataset(str(path), load(str(path))) if folder is None else _check_folder(str(path), folder)


# ---- folders ---------------------------------------------------------------------------------------------------------


def _check_folder(path: str, folder: Path) -> DataCheck:
    layout = read_layout(folder)
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(_inspect, layout.files))
    seen = {at: result for at, result in enumerate(results) if not isinstance(result, DataError)}
    files, places = [layout.files[at] for at in seen], [layout.places[at] for at in seen]
    pictures, digests = [picture for picture, _ in seen.values()], [digest for _, digest in seen.values()]
    return DataCheck(
        path=path,
        images=len(seen),
        counts=dict(Counter(places)),
        shapes=_most_common(f"{one.height} x {one.width}" for one in pictures),
        modes=_most_common(f"{one.mode}, {one.bits} bit" for one in pictures),
        skipped=_count_skipped(layout),
        merged=layout.merged,
        happened=happened(pictures),
        duplicates=_duplicates(digests, places, [shown(file, folder) for file in files]),
        unreadable={shown(file): str(one) for file, one in zip(layout.files, results, strict=True) if _is_error(one)},
        notes=(*layout.notes(), *picture_notes(files, pictures, folder), *_class_notes(layout.places)),
    )


def _inspect(file: Path) -> tuple[Picture, str] | DataError:
    try:
        return decode(file, SMALL)[1], hashlib.sha256(file.read_bytes()).hexdigest()
    except DataError as refusal:
        return refusal


def _is_error(found: object) -> bool:
    return isinstance(found, DataError)


def _class_notes(places: Sequence[Place]) -> list[str]:
    labels = {place.label for place in places}
    return [] if len(labels) > 1 else [f"all images have one class, {labels.pop()}: a simulation needs two classes."]


def _count_skipped(layout: Layout) -> dict[str, Skipped]:
    return {kind: Skipped(len(files), shown(files[0], layout.folder)) for kind, files in layout.skipped.items()}


# ---- other data sets -------------------------------------------------------------------------------------------------


def _check_dataset(path: str, dataset: Dataset) -> DataCheck:
    channels, height, width = dataset.x.shape[1:]
    places = _places(dataset)
    digests = [hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in dataset.x]
    names = [f"row {row}" for row in range(len(places))]
    return DataCheck(
        path=path,
        images=len(places),
        counts=dict(Counter(places)),
        shapes={f"{height} x {width}": len(places)},
        modes={f"{channels} channel{'s' if channels > 1 else ''}, 8 bit": len(places)},
        duplicates=_duplicates(digests, places, names),
        notes=dataset.notes,
    )


def _places(dataset: Dataset) -> list[Place]:
    rows = len(dataset.y)
    domains = [""] * rows if dataset.domain is None else [dataset.domains[d] for d in dataset.domain.tolist()]
    splits = [""] * rows
    if dataset.official is not None:
        splits = ["train"] * dataset.official + ["test"] * (rows - dataset.official)
    labels = [dataset.classes[y] for y in dataset.y.tolist()]
    return [Place(*one) for one in zip(labels, domains, splits, strict=True)]


# ---- both ------------------------------------------------------------------------------------------------------------


def _most_common(things: Iterable[str]) -> dict[str, int]:
    return dict(Counter(things).most_common())


def _duplicates(digests: Sequence[str], places: Sequence[Place], names: Sequence[str]) -> Duplicates:
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
    return Duplicates(
        images=_count_copies(groups),
        across_splits=_count_copies(apart["split"]),
        across_classes=_count_copies(apart["label"]),
        example=(names[worst[0]], names[other]),
    )


def _count_copies(groups: Iterable[list[int]]) -> int:
    return sum(len(group) - 1 for group in groups)

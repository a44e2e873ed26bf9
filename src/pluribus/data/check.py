"""`pluribus data check`: what a data set holds, and what happens to it when it is read."""

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

SMALL = (3, 1, 1)  # the pixels are not kept


@dataclass(frozen=True)
class Skipped:
    """Files of a kind that are not read."""

    files: int
    example: str


@dataclass(frozen=True)
class Duplicates:
    """Images that are byte for byte the same as an earlier one."""

    images: int = 0
    across_splits: int = 0
    """Of these, those in another split than one of their copies: test images that were trained on."""
    across_classes: int = 0
    """Of these, those with another label than one of their copies."""
    example: tuple[str, str] | None = None


@dataclass(frozen=True)
class DataCheck:
    """What a data set holds, and what happens to it when it is read.

    >>> check_data("digits").images
    1797
    """

    path: str
    images: int
    """Those that can be read."""
    counts: dict[Place, int]
    """Images by class, domain and split."""
    shapes: dict[str, int]
    """Images by height x width, before they are resized."""
    modes: dict[str, int]
    """Images by channels and depth, as in the files."""
    skipped: dict[str, Skipped] = field(default_factory=dict)
    """Files that are not read, by suffix."""
    merged: dict[str, list[str]] = field(default_factory=dict)
    """Names of classes and domains with several spellings, and these."""
    happened: dict[str, int] = field(default_factory=lambda: happened([]))
    """Images that are scaled, turned, and so on."""
    duplicates: Duplicates = Duplicates()
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files that cannot be read, and why."""
    notes: tuple[str, ...] = ()
    """What a run would warn of."""

    @property
    def problem(self) -> str | None:
        """Why no run could read it, in a sentence."""
        if not self.unreadable:
            return None
        number = len(self.unreadable)
        return f"{number} of {number + self.images} images of {self.path} cannot be read: mend or delete them."

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
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
    """Look at all images of a folder, an `.npz` file or a data set by name.

    A layout that cannot be read is refused, as a run would refuse it. Files that cannot be read are all listed.
    """
    folder = folder_of(str(path))
    return _check_dataset(str(path), load(str(path))) if folder is None else _check_folder(str(path), folder)


# ---- folders ---------------------------------------------------------------------------------------------------------


def _check_folder(path: str, folder: Path) -> DataCheck:
    layout = read_layout(folder)
    with ThreadPoolExecutor() as pool:
        looks = list(pool.map(_looked_at, layout.files))
    seen = {at: look for at, look in enumerate(looks) if not isinstance(look, DataError)}
    files, places = [layout.files[at] for at in seen], [layout.places[at] for at in seen]
    pictures, digests = [picture for picture, _ in seen.values()], [digest for _, digest in seen.values()]
    return DataCheck(
        path=path,
        images=len(seen),
        counts=dict(Counter(places)),
        shapes=_most_common(f"{one.height} x {one.width}" for one in pictures),
        modes=_most_common(f"{one.mode}, {one.bits} bit" for one in pictures),
        skipped=_skipped(layout),
        merged=layout.merged,
        happened=happened(pictures),
        duplicates=_duplicates(digests, places, [shown(file, folder) for file in files]),
        unreadable={shown(file): str(look) for file, look in zip(layout.files, looks, strict=True) if _is_error(look)},
        notes=(*layout.notes(), *picture_notes(files, pictures, folder), *_about_classes(layout.places)),
    )


def _looked_at(file: Path) -> tuple[Picture, str] | DataError:
    try:
        return decode(file, SMALL)[1], hashlib.sha256(file.read_bytes()).hexdigest()
    except DataError as refusal:
        return refusal


def _is_error(found: object) -> bool:
    return isinstance(found, DataError)


def _about_classes(places: Sequence[Place]) -> list[str]:
    labels = {place.label for place in places}
    return [] if len(labels) > 1 else [f"all images are of one class, {labels.pop()}: a simulation needs two."]


def _skipped(layout: Layout) -> dict[str, Skipped]:
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


# ---- what both count -------------------------------------------------------------------------------------------------


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
        images=_beyond_first(groups),
        across_splits=_beyond_first(apart["split"]),
        across_classes=_beyond_first(apart["label"]),
        example=(names[worst[0]], names[other]),
    )


def _beyond_first(groups: Iterable[list[int]]) -> int:
    return sum(len(group) - 1 for group in groups)

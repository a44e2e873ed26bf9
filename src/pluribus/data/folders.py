"""Image folders as data sets: what the names of folders mean, and lists beside them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

import torch

from pluribus.data.dataset import PARTS, Dataset
from pluribus.data.images import Found, decoded, find_images, picture_notes, shown, skipped_note
from pluribus.data.lists import find_lists, read_splits
from pluribus.errors import DataError, MissingDataError

FOLDER_SIZE = 64
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
LAYOUTS = "class/*.jpg, domain/class/*.jpg or train/class/*.jpg and test/class/*.jpg"
ELSEWHERE = "images at another depth"
UNLISTED = "images that no list has"
POOLED = (
    "all splits are pooled and handed out anew. To keep them apart: --test official in a simulation; 'train', 'val' "
    "and 'test' in site.toml at a site."
)


def same_name(name: str) -> str:
    """One spelling for all that look alike: file systems compose accents or take them apart."""
    return normalize("NFC", name)


@dataclass(frozen=True)
class Place:
    """What the folders above an image say of it."""

    label: str
    domain: str = ""
    split: str = ""
    """train, val or test; empty where there are no splits."""


@dataclass(frozen=True)
class Layout:
    """The images of a folder, test images last, and what their folders say."""

    folder: Path
    files: list[Path]
    places: list[Place]
    skipped: dict[str, list[Path]]
    merged: dict[str, list[str]]
    """Names of classes and domains that are spelled in several ways, and these."""
    listed: bool = False
    """Whether splits come from lists beside the images: a fixed split, and no official test set."""

    @property
    def official(self) -> int | None:
        """Images before the official test set, where there is one."""
        tests = 0 if self.listed else sum(place.split == "test" for place in self.places)
        return len(self.places) - tests if 0 < tests < len(self.places) else None

    def notes(self) -> list[str]:
        """What is not plain from the folder alone."""
        return [*self._about_splits(), *self._about_names(), *skipped_note(self.skipped, self.folder)]

    def _about_splits(self) -> Iterable[str]:
        found = [place.split for place in self.places]
        if not found[0]:
            return
        sizes = [f"{split} ({found.count(split)} images)" for split in ("train", "val", "test") if split in found]
        if self.listed:
            yield f"the *_kfold.txt lists are the split, not --val-fraction and --test-fraction: {', '.join(sizes)}."
            return
        yield f"folders are read as splits of one data set, not as domains: {', '.join(sizes)}."
        if self.official is not None:
            yield POOLED
            if "val" in found:
                yield "val is part of the official training data: who holds it cuts its own validation rows."

    def _about_names(self) -> Iterable[str]:
        for name, spellings in self.merged.items():
            yield f"{len(spellings)} spellings of '{name}' that differ in their code points alone are read as one name."


def read_layout(folder: Path) -> Layout:
    """The images of a folder, and what their folders say: `class`, `domain/class`, or either of them within splits."""
    found = find_images(folder)
    files, elsewhere = _at_one_depth(folder, found)
    folders = [file.relative_to(folder).parts[:-1] for file in files]
    _refuse_bytes(folder, folders)
    merged: dict[str, list[str]] = {}
    places = _places(folder, folders)
    labels, domains = [place.label for place in places], [place.domain for place in places]
    for names in (labels, domains):
        merged |= _merged(names)
        _refuse_twins(folder, names)
    known = [Place(same_name(one.label), same_name(one.domain), one.split) for one in places]
    skipped = found.skipped | ({ELSEWHERE: elsewhere} if elsewhere else {})
    lists = find_lists(folder, domains) if domains[0] and not known[0].split else {}
    if lists:
        return _by_lists(Layout(folder, files, known, skipped, merged, listed=True), lists)
    order = sorted(range(len(files)), key=lambda at: known[at].split == "test")  # stable: no other order is lost
    return Layout(folder, [files[at] for at in order], [known[at] for at in order], skipped, merged)


def _by_lists(whole: Layout, lists: dict[str, list[Path]]) -> Layout:
    """The images that the lists have, with the splits that they say."""
    splits = read_splits(whole.folder, whole.files, lists)
    rows = [at for at, split in enumerate(splits) if split]
    read = {file for files in lists.values() for file in files}
    skipped = {kind: [file for file in files if file not in read] for kind, files in whole.skipped.items()}
    skipped[UNLISTED] = [file for file, split in zip(whole.files, splits, strict=True) if not split]
    return dataclasses.replace(
        whole,
        files=[whole.files[at] for at in rows],
        places=[dataclasses.replace(whole.places[at], split=splits[at]) for at in rows],
        skipped={kind: files for kind, files in skipped.items() if files},
    )


def _at_one_depth(folder: Path, found: Found) -> tuple[list[Path], list[Path]]:
    """The images that are read, and those that lie where none are expected."""
    depths: dict[int, list[Path]] = defaultdict(list)
    for file in found.images:
        depths[len(file.relative_to(folder).parts) - 1].append(file)
    if depths[1] and depths[2]:
        shallow, deep = (depths[depth][0].relative_to(folder) for depth in (1, 2))
        raise DataError(f"{folder} mixes class/*.jpg ({shallow}) and domain/class/*.jpg ({deep}): keep one of them.")
    depth = next((depth for depth in (1, 2, 3) if depths[depth]), None)
    if depth is None:
        raise MissingDataError(f"{folder} holds no images: they must lie at {LAYOUTS} in it.")
    return depths[depth], [file for other in sorted(depths) if other != depth for file in depths[other]]


def _refuse_bytes(folder: Path, folders: Iterable[tuple[str, ...]]) -> None:
    """Names go into files and over the network, where all is text."""
    for names in dict.fromkeys(folders):
        path = folder.joinpath(*names)
        if shown(path) != str(path):
            raise DataError(f"the name of the folder {shown(path)} is not UTF-8: rename it.")


def _places(folder: Path, folders: Sequence[tuple[str, ...]]) -> list[Place]:
    *above, labels = zip(*folders, strict=True)
    levels = [_splits(folder, names) for names in above]
    if not above and all(_split(name) for name in labels):
        raise DataError(f"{folder} has images directly in {labels[0]}: they must lie at {labels[0]}/class/*.jpg.")
    if len(above) == 2 and not any(levels):
        raise MissingDataError(f"{folder} holds no images at a depth that is known: they must lie at {LAYOUTS} in it.")
    splits = next((level for level in levels if level), [""] * len(folders))
    domains = next((names for names, level in zip(above, levels, strict=True) if not level), [""] * len(folders))
    return [Place(*one) for one in zip(labels, domains, splits, strict=True)]


def _split(name: str) -> str:
    return SPLITS.get(name.lower(), "")


def _splits(folder: Path, names: Sequence[str]) -> list[str]:
    """The splits that these folders are; nothing, if they are domains."""
    found = {name: _split(name) for name in names}
    if any(found.values()) and not all(found.values()):
        split, domain = (next(name for name in found if bool(found[name]) is known) for known in (True, False))
        raise DataError(f"{folder} has the folders '{split}', a split, and '{domain}', a domain: keep one of the two.")
    return [found[name] for name in names] if all(found.values()) else []


def _merged(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that become one, and their spellings."""
    spellings: dict[str, set[str]] = defaultdict(set)
    for name in names:
        spellings[same_name(name)].add(name)
    return {name: sorted(those) for name, those in spellings.items() if len(those) > 1}


def _refuse_twins(folder: Path, names: Iterable[str]) -> None:
    """Names that differ in case may be one class, or two such as a and A: only people know."""
    first: dict[str, str] = {}
    for name in sorted({same_name(name) for name in names}):
        other = first.setdefault(name.lower(), name)
        if other != name:
            raise DataError(
                f"{folder} has the folders '{other}' and '{name}', which differ in upper and lower case alone: give "
                f"them one name if they are one, or names that differ in more if they are two."
            )


def image_folder(folder: Path, image_size: int | None = None) -> Dataset:
    """A data set from a folder of images; a domain or a split may lack classes."""
    layout, size = read_layout(folder), image_size or FOLDER_SIZE
    x, pictures = decoded(layout.files, (3, size, size))
    labels, domains = [place.label for place in layout.places], [place.domain for place in layout.places]
    dataset = Dataset(
        name=folder.resolve().name,
        x=x,
        y=_numbers(labels),
        classes=tuple(sorted(set(labels))),
        official=layout.official,
        part=torch.tensor([PARTS.index(place.split) for place in layout.places]) if layout.listed else None,
        notes=(*layout.notes(), *picture_notes(layout.files, pictures, folder)),
    )
    if not domains[0]:
        return dataset
    return dataclasses.replace(dataset, domain=_numbers(domains), domains=tuple(sorted(set(domains))))


def _numbers(names: list[str]) -> torch.Tensor:
    number = {name: at for at, name in enumerate(sorted(set(names)))}
    return torch.tensor([number[name] for name in names])

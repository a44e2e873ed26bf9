"""Image folders as data sets: the meaning of folder names, and split lists beside the images."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

import torch

from pluribus.data.dataset import PARTS, Dataset
from pluribus.data.images import Found, decode_all, find_images, path_text, picture_notes, skipped_note
from pluribus.data.lists import find_lists, read_splits
from pluribus.errors import DataError, MissingDataError

FOLDER_SIZE = 64
SPLITS = {part: part for part in PARTS} | {"training": "train", "valid": "val", "validation": "val", "testing": "test"}
LAYOUTS = "class/*.jpg, domain/class/*.jpg or train/class/*.jpg and test/class/*.jpg"
ELSEWHERE = "images at another depth"
UNLISTED = "images in no list"
POOLED = (
    "all splits are pooled and split again. To keep them separate, use --test official in a simulation, or 'train', "
    "'val' and 'test' in site.toml at a site."
)


def normalize_name(name: str) -> str:
    """Return one spelling for names that look alike. File systems store accents composed or decomposed."""
    return normalize("NFC", name)


@dataclass(frozen=True)
class ImageLabels:
    """The class, domain and split of an image, by the names of its folders."""

    label: str
    domain: str = ""
    split: str = ""  # train, val or test. Empty: there are no splits.


@dataclass(frozen=True)
class Layout:
    """The images of a folder with their classes, domains and splits. Test images come last."""

    folder: Path
    files: list[Path]
    places: list[ImageLabels]
    skipped: dict[str, list[Path]]
    merged: dict[str, list[str]]  # class and domain names with several spellings, and the spellings
    listed: bool = False
    """Whether lists beside the images define the split. Such a split is fixed, without an official test set."""

    @property
    def official(self) -> int | None:
        """The number of images before the official test set. None: there is no such set."""
        tests = 0 if self.listed else sum(place.split == "test" for place in self.places)
        return len(self.places) - tests if 0 < tests < len(self.places) else None

    def notes(self) -> list[str]:
        """Sentences about what a person may not expect when this folder is read."""
        spellings = [
            f"{len(those)} spellings of '{name}' that differ only in their code points are read as one name."
            for name, those in self.merged.items()
        ]
        return [*self._split_notes(), *spellings, *skipped_note(self.skipped, self.folder)]

    def _split_notes(self) -> Iterable[str]:
        found = [place.split for place in self.places]
        if not found[0]:
            return
        sizes = [f"{split} ({found.count(split)} images)" for split in PARTS if split in found]
        if self.listed:
            yield f"the *_kfold.txt lists define the split, not --val-fraction and --test-fraction: {', '.join(sizes)}."
            return
        yield f"folders are read as splits of one data set, not as domains: {', '.join(sizes)}."
        if self.official is not None:
            yield POOLED
            if "val" in found:
                yield "val is part of the official training data: each client takes validation rows from its own rows."


def read_layout(folder: Path) -> Layout:
    """Read the layout of a folder: `class`, `domain/class`, or either of them inside splits."""
    found = find_images(folder)
    files, elsewhere = _select_depth(folder, found)
    folders = [file.relative_to(folder).parts[:-1] for file in files]
    _refuse_bytes(folder, folders)
    merged: dict[str, list[str]] = {}
    places = _places(folder, folders)
    labels, domains = [place.label for place in places], [place.domain for place in places]
    for names in (labels, domains):
        merged |= _find_spellings(names)
        _refuse_twins(folder, names)
    known = [ImageLabels(normalize_name(one.label), normalize_name(one.domain), one.split) for one in places]
    skipped = found.skipped | ({ELSEWHERE: elsewhere} if elsewhere else {})
    lists = find_lists(folder, domains) if domains[0] and not known[0].split else {}
    if lists:
        return _apply_lists(Layout(folder, files, known, skipped, merged, listed=True), lists)
    order = sorted(range(len(files)), key=lambda at: known[at].split == "test")  # stable: the rest of the order stays
    return Layout(folder, [files[at] for at in order], [known[at] for at in order], skipped, merged)


def _apply_lists(whole: Layout, lists: dict[str, list[Path]]) -> Layout:
    """Keep the images in the lists, with the splits from there."""
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


def _select_depth(folder: Path, found: Found) -> tuple[list[Path], list[Path]]:
    """Separate the images that are read from the images at other depths."""
    depths: dict[int, list[Path]] = defaultdict(list)
    for file in found.images:
        depths[len(file.relative_to(folder).parts) - 1].append(file)
    if depths[1] and depths[2]:
        shallow, deep = (depths[depth][0].relative_to(folder) for depth in (1, 2))
        raise DataError(f"{folder} mixes class/*.jpg ({shallow}) and domain/class/*.jpg ({deep}): keep only one.")
    depth = next((depth for depth in (1, 2, 3) if depths[depth]), None)
    if depth is None:
        raise MissingDataError(f"{folder} contains no images: put them at {LAYOUTS}.")
    return depths[depth], [file for other in sorted(depths) if other != depth for file in depths[other]]


def _refuse_bytes(folder: Path, folders: Iterable[tuple[str, ...]]) -> None:
    """Refuse names that are not UTF-8, because files and messages hold names as text."""
    for names in dict.fromkeys(folders):
        path = folder.joinpath(*names)
        if path_text(path) != str(path):
            raise DataError(f"the name of the folder {path_text(path)} is not UTF-8: rename it.")


def _places(folder: Path, folders: Sequence[tuple[str, ...]]) -> list[ImageLabels]:
    *above, labels = zip(*folders, strict=True)
    levels = [_splits(folder, names) for names in above]
    if not above and all(_split(name) for name in labels):
        raise DataError(f"{folder} has images directly in {labels[0]}: put them at {labels[0]}/class/*.jpg.")
    if len(above) == 2 and not any(levels):
        raise MissingDataError(f"{folder} contains no images at a known depth: put them at {LAYOUTS}.")
    splits = next((level for level in levels if level), [""] * len(folders))
    domains = next((names for names, level in zip(above, levels, strict=True) if not level), [""] * len(folders))
    return [ImageLabels(*one) for one in zip(labels, domains, splits, strict=True)]


def _split(name: str) -> str:
    return SPLITS.get(name.lower(), "")


def _splits(folder: Path, names: Sequence[str]) -> list[str]:
    """The splits with these folder names. Empty: they are domains."""
    found = {name: _split(name) for name in names}
    if any(found.values()) and not all(found.values()):
        split, domain = (next(name for name in found if bool(found[name]) is known) for known in (True, False))
        raise DataError(f"{folder} has the folders '{split}', a split, and '{domain}', a domain: keep only one kind.")
    return [found[name] for name in names] if all(found.values()) else []


def _find_spellings(names: Iterable[str]) -> dict[str, list[str]]:
    """Names with several spellings, and the spellings."""
    spellings: dict[str, set[str]] = defaultdict(set)
    for name in names:
        spellings[normalize_name(name)].add(name)
    return {name: sorted(those) for name, those in spellings.items() if len(those) > 1}


def _refuse_twins(folder: Path, names: Iterable[str]) -> None:
    """Refuse names that differ only in case. They may be one class or two, such as a and A: only a person knows."""
    first: dict[str, str] = {}
    for name in sorted({normalize_name(name) for name in names}):
        other = first.setdefault(name.lower(), name)
        if other != name:
            raise DataError(
                f"{folder} has the folders '{other}' and '{name}', which differ only in upper and lower case: "
                f"give them one name if they are the same, or clearly different names if they are not."
            )


def read_image_folder(folder: Path, image_size: int | None = None) -> Dataset:
    """Read a folder of images as a data set. A domain or a split may lack classes."""
    layout, size = read_layout(folder), image_size or FOLDER_SIZE
    x, pictures = decode_all(layout.files, (3, size, size))
    labels, domains = [place.label for place in layout.places], [place.domain for place in layout.places]
    return Dataset(
        name=folder.resolve().name,
        x=x,
        y=_numbers(labels),
        classes=tuple(sorted(set(labels))),
        official=layout.official,
        domain=_numbers(domains) if domains[0] else None,
        domains=tuple(sorted(set(domains))) if domains[0] else (),
        part=torch.tensor([PARTS.index(place.split) for place in layout.places]) if layout.listed else None,
        notes=(*layout.notes(), *picture_notes(layout.files, pictures, folder)),
    )


def _numbers(names: list[str]) -> torch.Tensor:
    number = {name: at for at, name in enumerate(sorted(set(names)))}
    return torch.tensor([number[name] for name in names])

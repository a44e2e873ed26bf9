"""Lists beside the images of a folder, as PACS has them: which of its images train, validate and test.

`DOMAIN_train_kfold.txt`, `DOMAIN_crossval_kfold.txt` and `DOMAIN_test_kfold.txt` hold a line per image, such as
`photo/dog/056_0001.jpg 1`. The folder names the class, so the number behind the path is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from unicodedata import normalize

from pluribus.errors import DamagedDataError, DataError, MissingDataError

LISTS = ("train", "crossval", "test")
Splits = list[str]  # per image: train, val or test; empty where no list has it


def find_lists(folder: Path, domains: Iterable[str]) -> dict[str, list[Path]]:
    """The lists of a folder by their kind, one per domain; nothing, where there are none."""
    found = {kind: [folder / f"{domain}_{kind}_kfold.txt" for domain in sorted(set(domains))] for kind in LISTS}
    files = [file for of_kind in found.values() for file in of_kind]
    missing = [file for file in files if not file.is_file()]
    if len(missing) == len(files):
        return {}
    if missing:
        raise MissingDataError(f"{missing[0]} is missing: add it, or take away the other *_kfold.txt lists.")
    return found


def read_splits(folder: Path, files: Sequence[Path], lists: dict[str, list[Path]]) -> Splits:
    """Which split each image belongs to. Who is trained on is never tested on.

    The published test lists hold all images, those of the other two lists too. So an image of a training list trains,
    whatever else lists it. Of those that both other lists have, every other one of a domain and class validates.
    """
    train, val, test = (_listed(lists[kind]) for kind in LISTS)
    turns: dict[Path, count[int]] = {}
    splits = []
    for file in files:
        name = normalize("NFC", file.relative_to(folder).as_posix())
        if name in train:
            splits.append("train")
        elif name in val and name in test:
            turn = next(turns.setdefault(file.parent, count()))
            splits.append("test" if turn % 2 else "val")
        else:
            splits.append("val" if name in val else "test" if name in test else "")
    for split in ("train", "val", "test"):
        if split not in splits:
            raise DataError(f"the lists of {folder} leave no image to {SAID[split]} on: mend them or take them away.")
    return splits


SAID = {"train": "train", "val": "validate", "test": "test"}


def _listed(lists: Iterable[Path]) -> set[str]:
    return {name for file in lists for name in _names(file)}


def _names(file: Path) -> Iterable[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedDataError(f"cannot read {file}: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        if not name or not label.isdecimal():
            raise DamagedDataError(
                f"line {number} of {file} must be 'domain/class/image.jpg NUMBER', not '{line[:80]}'."
            )
        yield normalize("NFC", name.strip())

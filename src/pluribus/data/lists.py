"""Lists beside the images of a folder, as in PACS: which images are for training, validation and test.

`DOMAIN_train_kfold.txt`, `DOMAIN_crossval_kfold.txt` and `DOMAIN_test_kfold.txt` have one line per image, such
as `photo/dog/056_0001.jpg 1`. The class is the name of the folder, so the number after the path is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from unicodedata import normalize

from pluribus.errors import DamagedDataError, DataError, MissingDataError

LISTS = ("train", "crossval", "test")
Splits = list[str]  # per image: train, val or test; empty if it is in no list


def find_lists(folder: Path, domains: Iterable[str]) -> dict[str, list[Path]]:
    """Find the lists of a folder by kind, one per domain. Empty: there are none."""
    found = {kind: [folder / f"{domain}_{kind}_kfold.txt" for domain in sorted(set(domains))] for kind in LISTS}
    files = [file for of_kind in found.values() for file in of_kind]
    missing = [file for file in files if not file.is_file()]
    if len(missing) == len(files):
        return {}
    if missing:
        raise MissingDataError(f"{missing[0]} is missing: add it, or remove the other *_kfold.txt lists.")
    return found


def read_splits(folder: Path, files: Sequence[Path], lists: dict[str, list[Path]]) -> Splits:
    """Read the split of each image. A training image is never a test image.

    The published test lists contain all images, including those of the other two lists. So an image in a training list
    is for training, even if it is in other lists. Of the images in both other lists, every second one of a domain and
    class is for validation.
    """
    train, val, test = ({name for file in lists[kind] for name in _read_list(file)} for kind in LISTS)
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
    for split, purpose in (("train", "training"), ("val", "validation"), ("test", "test")):
        if split not in splits:
            raise DataError(f"the lists of {folder} leave no image for {purpose}: repair or remove them.")
    return splits


def _read_list(file: Path) -> Iterable[str]:
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

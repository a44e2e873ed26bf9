"""Data sets of Hugging Face by name: `hf:NAME` or `hf:NAME:CONFIGURATION`. A folder is a name too."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pluribus.data.columns import describe_rows, make_dataset
from pluribus.data.dataset import PARTS, Dataset, last_line
from pluribus.data.files import arrow_cells
from pluribus.data.folders import FOLDER_SIZE
from pluribus.data.images import Shape, decode, picture_notes
from pluribus.data.reading import DEFAULT, Reading
from pluribus.data.roles import LABEL, check_settings, find_roles, kind_of_rows, list_names
from pluribus.data.sheet import SPLITS, Piece, Sheet, join
from pluribus.errors import DamagedDataError, DataError, FormatError, MissingDataError, PackageError, PluribusError
from pluribus.inputs import Kind

PREFIX = "hf:"
SILENT_NETWORK_SECONDS = 30.0
GRAY = ("1", "L")


@dataclass(frozen=True)
class Hub:
    """A data set of Hugging Face: its splits, and which of its columns hold images."""

    sheet: Sheet
    image: str | None
    """The column of images that are the inputs. None: the inputs are other columns."""
    parts: tuple[Any, ...]
    """The splits that were read, as Hugging Face has them."""


def read_hub(name: str, reading: Reading = DEFAULT, image_size: int | None = None) -> Dataset:
    """Load a data set of Hugging Face: images if a column holds them, else what the columns of a file would be."""
    return _make_images(open_hub(name, reading), reading, image_size)


def kind_of_hub(name: str, reading: Reading) -> Kind:
    """The kind of a data set of Hugging Face, by the roles and the types of its columns. Without a network: `image`."""
    if (kind := kind_of_rows((), reading)) != "table":
        return kind
    try:
        features = _features(name)
    except PluribusError:
        return "image"  # loading says what is wrong
    return kind_of_rows([*features], reading) if _image_column(features, reading) is None else "image"


def hub_columns(name: str) -> tuple[str, ...]:
    """The names of the columns of a data set of Hugging Face."""
    return tuple(_features(name))


def open_hub(name: str, reading: Reading) -> Hub:
    """Load the splits of a data set, as columns. Images are not decoded yet."""
    found, notes = _choose_splits(name, _call(name, "load_dataset"))
    label = reading.one("label") or LABEL
    image: str | None = None
    sheets: dict[str, Sheet] = {}
    kept = []
    for split, part in found.items():
        image = _image_column(part.features, reading)
        sheet = _read_split(name, split if len(found) > 1 else "", part)
        if label in sheet.columns and all(cell is None for cell in sheet.columns[label]):
            notes.append(f"the split {split} is not read: its labels are not published.")
            continue
        sheets[split] = sheet
        kept.append(part)
    if not sheets:
        raise DataError(f"{name} has no rows with a label in the column '{label}'.")
    whole = join(name, sheets) if len(sheets) > 1 else next(iter(sheets.values()))
    sheet = Sheet(whole.name, whole.columns, whole.pieces, (*notes, *whole.notes), whole.part)
    return Hub(sheet, image, tuple(kept))


def _choose_splits(name: str, splits: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The splits that train, validate and test. One split alone may have any name."""
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}, []
    known = {SPLITS[split.lower()]: part for split, part in splits.items() if split.lower() in SPLITS}
    if not known:
        raise DataError(f"{name} has the splits {list_names(splits)}, but none of them is train, validation or test.")
    other = [split for split in splits if split.lower() not in SPLITS]
    notes = [f"the splits {list_names(other)} are not read: a split is train, validation or test."] if other else []
    return {part: known[part] for part in PARTS if part in known}, notes


def _read_split(name: str, split: str, part: Any) -> Sheet:
    columns: dict[str, Any] = {}
    pictures = {key for key, feature in part.features.items() if _type(feature) == "Image"}
    table = part.remove_columns([*pictures]).with_format("arrow")[:] if part.num_columns > len(pictures) else None
    for key, feature in part.features.items():
        if key in pictures or table is None:
            columns[key] = [None] * part.num_rows  # stands for images, which are decoded one by one
            continue
        columns[key] = arrow_cells(table[key])
        if _type(feature) == "ClassLabel":  # -1 and null: the label is not published
            names = [*feature.names, None]
            columns[key] = [names[-1 if cell is None else int(cell)] for cell in columns[key]]
    path = f"{name} ({split})" if split else name
    return Sheet(name, columns, (Piece(path, part.num_rows),))


# Hugging Face's functions ---------------------------------------------------------------------------------------------


def _parse(name: str) -> tuple[str, str | None]:
    source, _, configuration = name.removeprefix(PREFIX).partition(":")
    if not source:
        raise FormatError(f"'{name}' names no data set: write {PREFIX}NAME or {PREFIX}NAME:CONFIGURATION.")
    return source, configuration or None


def _call(name: str, function: str) -> Any:
    """Call a function of Hugging Face's library on a data set."""
    source, configuration = _parse(name)
    try:
        import datasets
        import huggingface_hub
    except ImportError as missing:
        raise PackageError(f"{name} needs a package that is missing: pip install 'pluribus[hf]'.") from missing
    try:
        if not Path(source).expanduser().exists() and not datasets.config.HF_HUB_OFFLINE:
            # one request first, because datasets retries for half a minute without internet
            huggingface_hub.dataset_info(source, timeout=SILENT_NETWORK_SECONDS)
        here = str(Path(source).expanduser()) if Path(source).expanduser().exists() else source
        return getattr(datasets, function)(here, configuration)
    except Exception as reason:  # of the network, of files, or of a configuration that must be named
        raise MissingDataError(
            f"{name} could not be loaded ({last_line(reason)}). If it was downloaded before, set HF_HUB_OFFLINE=1."
        ) from reason


@cache
def _features(name: str) -> Mapping[str, Any]:
    return _call(name, "load_dataset_builder").info.features or {}


def _type(feature: Any) -> str:
    return type(feature).__name__


def _image_column(features: Mapping[str, Any], reading: Reading) -> str | None:
    """The column of images that are the inputs: the one that the user names, or the first, if the user names none."""
    if reading.named("text") or reading.window is not None:
        return None
    images = [key for key, feature in features.items() if _type(feature) == "Image"]
    named = reading.named("inputs")
    free = [key for key in images if key not in reading.named("ignore")]
    return next((key for key in free if not named or key in named), None)


# Images ---------------------------------------------------------------------------------------------------------------


def _make_images(hub: Hub, reading: Reading, image_size: int | None) -> Dataset:
    if hub.image is None:
        return make_dataset(hub.sheet, reading)
    sheet = hub.sheet
    known = Reading((*((r, c) for r, c in reading.columns if r != "inputs"), ("inputs", (hub.image,))))
    roles = find_roles([*sheet.columns], sheet.path, known)
    check_settings("image", reading)
    rows = describe_rows(sheet, roles, reading)
    x, notes = _decode(hub, image_size)
    return Dataset(sheet.name, x, notes=(*sheet.notes, *roles.notes, *rows.notes, *notes), **rows.fields())


def _decode(hub: Hub, image_size: int | None) -> tuple[Tensor, list[str]]:
    """Images as bytes. They keep their size if all have one, otherwise they become squares."""
    sizes, modes = set(), set()
    for row, content in enumerate(_contents(hub)):
        try:
            with Image.open(io.BytesIO(content)) as image:  # reads only the header
                sizes.add((image.height, image.width))
                modes.add(image.mode)
        except Exception as reason:  # Pillow raises many kinds of errors, depending on the damage
            raise DamagedDataError(f"{hub.sheet.where(row)} is no image that can be read ({reason}).") from reason
    height, width = next(iter(sizes)) if len(sizes) == 1 and image_size is None else [image_size or FOLDER_SIZE] * 2
    shape: Shape = (1 if modes <= {*GRAY} else 3, height, width)
    names = [Path(hub.sheet.where(row)) for row in range(hub.sheet.rows)]
    x = torch.empty((len(names), *shape), dtype=torch.uint8)
    with ThreadPoolExecutor() as pool:
        pictures = []
        for row, (pixels, picture) in enumerate(pool.map(decode, names, [shape] * len(names), _contents(hub))):
            x[row] = pixels
            pictures.append(picture)
    notes = picture_notes(names, pictures)
    if len(sizes) > 1 and image_size is None:
        notes.append(f"images of {len(sizes)} sizes are resized to {height} x {width} (--image-size).")
    return x, notes


def _contents(hub: Hub) -> Iterator[bytes]:
    """The bytes of each image's file."""
    import datasets

    row = 0
    for part in hub.parts:
        for cell in part.cast_column(hub.image, datasets.Image(decode=False))[hub.image]:
            if cell is None:
                raise DamagedDataError(f"{hub.sheet.where(row)} has no image in the column '{hub.image}'.")
            yield Path(cell["path"]).read_bytes() if cell["bytes"] is None else cell["bytes"]
            row += 1

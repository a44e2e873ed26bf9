"""Image files: which files are read, and how they become bytes.

Simulations, real sites and predictions all read files through this module, so the same file always gives the same
bytes. `Picture` records what happened to a file, so that it can be counted and reported.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from pluribus.errors import DamagedDataError, DataError

Shape = tuple[int, int, int]

SUFFIXES = frozenset(
    [".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"]
)
HIDDEN, BARE = "hidden", "without a suffix"  # kinds of files that cannot be counted by suffix
DEEP = ("I;16", "I;16B", "I;16L", "I;16N")  # Pillow's modes of gray pixels with more than 8 bits
DIM = 1 / 8  # of the range: if no pixel is brighter, too few of the 256 levels are left
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


# Files ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The files below a folder, in an order that does not depend on the file system."""

    images: list[Path]
    skipped: dict[str, list[Path]]  # files that are not read, by suffix or by another reason


def find_images(folder: Path) -> Found:
    """Find all images below a folder, and all other files."""
    images: list[Path] = []
    skipped: dict[str, list[Path]] = defaultdict(list)
    try:
        files = sorted(_walk(folder, (folder.resolve(),)), key=lambda path: path.parts)
    except OSError as error:
        raise DamagedDataError(f"cannot read the folder {error.filename}: {error.strerror}.") from error
    for path in files:
        suffix = path.suffix.lower()
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            skipped[HIDDEN].append(path)
        elif suffix in SUFFIXES:
            images.append(path)
        else:
            skipped[path_text(Path(suffix)) if suffix else BARE].append(path)
    return Found(images, dict(skipped))


def _walk(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """List all files. Follow links to folders, except links back to a parent folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if not entry.is_dir():
                yield path
            elif (real := path.resolve()) not in above:
                yield from _walk(path, (*above, real))


def path_text(path: Path, folder: Path | None = None) -> str:
    """A path as printable text, relative to `folder` if it is given. On Linux, a name may be any bytes."""
    seen = path if folder is None else path.relative_to(folder)
    return str(seen).encode(errors="backslashreplace").decode()


def skipped_note(skipped: Mapping[str, Sequence[Path]], folder: Path) -> list[str]:
    """A sentence with the number of files that were not read. Empty: there are none."""
    if not skipped:
        return []
    kinds = [f"{len(files)} {kind} (such as {path_text(files[0], folder)})" for kind, files in skipped.items()]
    number = sum(map(len, skipped.values()))
    return [f"{number} {'file was' if number == 1 else 'files were'} not read: {', '.join(kinds)}."]


# Pixels ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """The properties of an image file before it was converted to bytes of a shape."""

    height: int
    width: int
    mode: str  # Pillow's name for its channels: L, RGB, P, CMYK, ...
    bits: int  # per channel
    orientation: int | None  # EXIF orientation; 1 is upright. None: the EXIF data cannot be read.
    transparent: bool  # whether any pixel is not opaque
    further: int  # number of pictures after the first, such as previews of a camera. They are not read.
    brightest: float | None
    """The largest gray pixel as a fraction of the range, for images with more than 8 bits. None: other images."""


def decode(file: Path, shape: Shape, content: bytes | None = None) -> tuple[Tensor, Picture]:
    """Read an image file as bytes: rotate it upright, scale it to 8 bits, convert it to gray or RGB, and resize it.

    `content` is what the file holds, if `file` is only its name.
    """
    try:
        # from memory: Pillow would take as much of it as a damaged file claims to have
        with Image.open(io.BytesIO(file.read_bytes() if content is None else content)) as image:
            picture, upright = _prepare(image, file)
            return pixels(upright, shape), picture
    except DataError:
        raise
    # Pillow raises OSError, SyntaxError, ValueError or its own errors, depending on the damage
    except Exception as reason:
        raise DamagedDataError(
            f"{path_text(file)} cannot be read as an image ({reason}): repair or delete it."
        ) from reason


def _prepare(image: Image.Image, file: Path) -> tuple[Picture, Image.Image]:
    pages = getattr(image, "n_frames", 1)
    if pages > 1 and image.format != "MPO":  # a camera's MPO file has previews after the photo
        raise DamagedDataError(
            f"{path_text(file)} contains {pages} pages or frames: save each of them as a separate file."
        )
    bits, mode, tags = _bits(image), image.mode, dict(_tags(image))  # before load(), which drops some of it
    image.load()
    orientation = int(tags.get(ExifTags.Base.Orientation, 1)) if tags else _orientation(image)
    transparent = _is_transparent(image)
    image.info.pop("transparency", None)  # the alpha channel is dropped, so Pillow need not warn about it
    # Pillow handles TIFF files in which 0 is white, but not with 16 bits
    negative = tags.get(ExifTags.Base.PhotometricInterpretation) == 0
    brightest, eight = _to_eight_bits(image, bits, negative, file)
    if not tags and orientation in TURNS:  # Pillow rotates TIFF images by itself
        eight = eight.transpose(TURNS[orientation])
    return Picture(eight.height, eight.width, mode, bits, orientation, transparent, pages - 1, brightest), eight


def _tags(image: Image.Image) -> Mapping[int, Any]:
    """The tags of a TIFF file. Empty: another format."""
    return image.tag_v2 if image.format == "TIFF" else {}  # type: ignore[attr-defined]


def _bits(image: Image.Image) -> int:
    """Bits per channel in the file."""
    if tags := _tags(image):
        return int(tags.get(ExifTags.Base.BitsPerSample, (1,))[0])
    if image.mode in DEEP or image.mode == "I":
        return 16
    arguments = [tile[3] for tile in getattr(image, "tile", ())]
    if image.format == "PNG" and any(str(words).endswith(";16B") for words in arguments):
        return 16
    if image.format == "PPM" and any(isinstance(words, tuple) and int(words[1]) > 255 for words in arguments):
        return 16
    return 1 if image.mode == "1" else 8


def _orientation(image: Image.Image) -> int | None:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF data raises almost any error, and the pixels may be intact
        return None


def _is_transparent(image: Image.Image) -> bool:
    if image.mode in ("LA", "PA", "RGBA"):
        return int(image.getchannel("A").getextrema()[0]) < 255  # type: ignore[arg-type]
    if "transparency" not in image.info:
        return False
    return image.mode in (*DEEP, "I") or int(image.convert("RGBA").getchannel("A").getextrema()[0]) < 255  # type: ignore[arg-type]


def _to_eight_bits(image: Image.Image, bits: int, negative: bool, file: Path) -> tuple[float | None, Image.Image]:
    """Scale gray pixels of a known depth to bytes, rounded to the nearest. Pillow would clip them at 255."""
    if image.mode not in (*DEEP, "I", "F"):
        return None, image
    if image.mode == "F" or bits > 16 or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise DamagedDataError(
            f"{path_text(file)} has pixels of mode {image.mode} ({bits} bits), and the value of white is not known: "
            f"save it with 8 or 16 unsigned bits per channel."
        )
    white = 2**bits - 1
    numbers = np.asarray(image).astype(np.uint32)
    if negative:
        numbers = white - numbers
    scaled = (numbers * 255 + white // 2) // white
    return float(numbers.max() / white), Image.fromarray(scaled.astype(np.uint8))


def decode_all(files: Sequence[Path], shape: Shape) -> tuple[Tensor, list[Picture]]:
    """Read image files as bytes, one row each, with their properties."""
    x = torch.empty((len(files), *shape), dtype=torch.uint8)

    def decode_into(at: int) -> Picture | DataError:
        try:
            x[at], picture = decode(files[at], shape)
        except DataError as refusal:
            return refusal
        return picture

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(decode_into, range(len(files))))
    if refusals := [one for one in found if isinstance(one, DataError)]:
        first, more = refusals[0], len(refusals) - 1
        files_more = "1 more file" if more == 1 else f"{more} more files"
        rest = f" {files_more} cannot be read: pluribus data check lists them all." if more else ""
        raise type(first)(f"{first}{rest}") from first
    return x, [one for one in found if isinstance(one, Picture)]


# Notes ----------------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """Something that may happen to a picture. `fact` and `done` are words that follow `3 of 40 images`."""

    happened_to: Callable[[Picture], bool]
    fact: str
    done: str


EVENTS = {
    "scaled": Event(lambda one: one.bits > 8, "have more than 8 bits per channel", "their pixels are scaled to 0..255"),
    "turned": Event(
        lambda one: one.orientation in TURNS, "are not stored upright", "they are rotated by their EXIF orientation"
    ),
    "damaged_exif": Event(
        lambda one: one.orientation is None, "have damaged EXIF data", "they are read without rotation"
    ),
    "transparent": Event(lambda one: one.transparent, "have transparent pixels", "their alpha channel is dropped"),
    "cmyk": Event(lambda one: one.mode == "CMYK", "are CMYK", "they are converted to RGB without their color profile"),
    "further_pictures": Event(
        lambda one: one.further > 0, "contain further pictures, such as previews", "only the first is read"
    ),
}


def count_events(pictures: Sequence[Picture]) -> dict[str, int]:
    """Count the pictures that were scaled, rotated, and so on."""
    return {name: sum(event.happened_to(one) for one in pictures) for name, event in EVENTS.items()}


def picture_notes(files: Sequence[Path], pictures: Sequence[Picture], folder: Path | None = None) -> list[str]:
    """What happened to these files: one sentence per kind of event, with an example."""
    notes = []
    for event in EVENTS.values():
        those = [file for file, picture in zip(files, pictures, strict=True) if event.happened_to(picture)]
        if those:
            example = path_text(those[0], folder)
            notes.append(f"{len(those)} of {len(files)} images {event.fact} (such as {example}): {event.done}.")
    deep = [one.brightest for one in pictures if one.brightest is not None]
    if deep and max(deep) < DIM:
        notes.append(
            f"no pixel of the {len(deep)} gray images with more than 8 bits is brighter than {max(deep):.1%} of their "
            f"range: {int(max(deep) * 255 + 0.5) + 1} of 256 levels are left. Scale the files to their full range."
        )
    return notes


def pixels(image: Image.Image, shape: Shape) -> Tensor:
    """Convert a decoded image to bytes of this shape: channels (1 is gray, 3 is RGB), height and width."""
    channels, height, width = shape
    scaled = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(scaled)).view(height, width, channels).permute(2, 0, 1)

"""Data sets that fall into domains: one task under several conditions, such as turned digits, photos and sketches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pluribus.data.datasets import Dataset, data_folder, load, pixels, register_data, resized
from pluribus.draws import numpy_rng
from pluribus.errors import DataError

ANGLES = (0, 20, 40, 60)
PER_CLASS = 100
FOLDER_SIZE = 64
PRETRAINED_SIZE = 224
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}


# Rotations ------------------------------------------------------------------------------------------------------------


def rotated(base: Dataset, per_class: int, angles: Sequence[float], seed: int, independent: bool) -> Dataset:
    """A domain per angle, each with the same random training images of `base`, turned clockwise by that many degrees.

    Rows of one base image share its identity, so that no party trains on a turned copy of another's test image.
    `independent` gives that up: every domain may then be split on its own.
    """
    chosen = _chosen(base, per_class, seed)
    images = [Image.fromarray(image) for image in base.x[chosen].permute(0, 2, 3, 1).squeeze(3).numpy()]
    # PIL turns counter-clockwise and fills the corners with 0
    turned = np.stack(
        [np.asarray(image.rotate(-angle, Image.Resampling.BILINEAR)) for angle in angles for image in images]
    )
    x = torch.from_numpy(turned).view(len(turned), *base.x.shape[2:], -1).permute(0, 3, 1, 2).contiguous()
    return Dataset(
        name=f"rotated-{base.name}" + ("-independent" if independent else ""),
        x=x,
        y=base.y[chosen].repeat(len(angles)),
        classes=base.classes,
        domain=torch.arange(len(angles)).repeat_interleave(len(chosen)),
        domains=tuple(f"M{angle:g}" for angle in angles),
        identity=None if independent else chosen.repeat(len(angles)),
    )


def _chosen(base: Dataset, per_class: int, seed: int) -> torch.Tensor:
    """Rows of `per_class` random training images of each class, class by class."""
    labels = base.y[: base.official].numpy()
    counts = np.bincount(labels, minlength=len(base.classes))
    if counts.min() < per_class:
        scarce = base.classes[int(counts.argmin())]
        raise DataError(
            f"{base.name} has only {counts.min()} training images of class {scarce}: {per_class} are too many."
        )
    rng = numpy_rng(seed, "rotated", base.name)
    rows = [rng.choice(np.flatnonzero(labels == c), per_class, replace=False) for c in range(len(base.classes))]
    return torch.from_numpy(np.concatenate(rows))


@register_data("rotated-mnist", "1,000 MNIST digits under 4 angles: domains M0 M20 M40 M60, copies kept in one part")
def _rotated_mnist(seed: int) -> Dataset:
    return rotated(load("mnist"), PER_CLASS, ANGLES, seed, independent=False)


@register_data("rotated-mnist-independent", "rotated-mnist with every domain split on its own, copies may leak")
def _rotated_mnist_independent(seed: int) -> Dataset:
    return rotated(load("mnist"), PER_CLASS, ANGLES, seed, independent=True)


@register_data("rotated-digits", "1,000 embedded digits under 4 angles at 16 x 16: domains M0 M20 M40 M60, no download")
def _rotated_digits(seed: int) -> Dataset:
    # at 8 x 8 strokes are one pixel wide: turned by 40 degrees, the holes of 4, 6 and 8 fill up
    return rotated(resized(load("digits"), 16), PER_CLASS, ANGLES, seed, independent=False)


# Image folders --------------------------------------------------------------------------------------------------------


def image_folder(folder: Path, image_size: int | None = None) -> Dataset:
    """A data set from `folder/class/*.jpg`, or from `folder/domain/class/*.jpg`, where a domain may lack classes."""
    with_domains, files = _image_files(folder)
    classes = sorted({file.parent.name for file in files})
    size = image_size or FOLDER_SIZE
    dataset = Dataset(
        name=folder.resolve().name,
        x=decoded(files, (3, size, size)),
        y=_numbers([file.parent.name for file in files], classes),
        classes=tuple(classes),
    )
    if not with_domains:
        return dataset
    domains = sorted({file.parent.parent.name for file in files})
    domain = _numbers([file.parent.parent.name for file in files], domains)
    return dataclasses.replace(dataset, domain=domain, domains=tuple(domains))


def _image_files(folder: Path) -> tuple[bool, list[Path]]:
    """Whether the folder has domains, and its images in an order that no file system decides."""
    found = {depth: images_at(folder, pattern) for depth, pattern in ((False, "*/*"), (True, "*/*/*"))}
    if not any(found.values()):
        raise DataError(f"{folder} holds no images: they must lie at class/*.jpg or domain/class/*.jpg in it.")
    if all(found.values()):
        shallow, deep = (files[0].relative_to(folder) for files in found.values())
        raise DataError(f"{folder} mixes class/*.jpg ({shallow}) and domain/class/*.jpg ({deep}): keep one of them.")
    with_domains = bool(found[True])
    return with_domains, found[with_domains]


def images_at(folder: Path, pattern: str) -> list[Path]:
    """The images in a folder that a pattern finds, but for hidden ones, in an order that no file system decides."""
    images = (path for path in folder.glob(pattern) if path.suffix.lower() in SUFFIXES)
    visible = (path for path in images if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    return sorted(visible, key=lambda path: path.parts)


def _numbers(names: list[str], known: list[str]) -> torch.Tensor:
    number = {name: at for at, name in enumerate(known)}
    return torch.tensor([number[name] for name in names])


def decoded(files: Sequence[Path], shape: tuple[int, int, int]) -> torch.Tensor:
    """Image files as bytes: one row each, brought to the shape."""
    x = torch.empty((len(files), *shape), dtype=torch.uint8)

    def decode(at: int) -> None:
        try:
            with Image.open(files[at]) as image:
                x[at] = pixels(image, shape)
        # Pillow raises OSError, SyntaxError, ValueError and its own errors, depending on what is broken in the file
        except Exception as reason:
            raise DataError(f"{files[at]} cannot be read as an image ({reason}): mend or delete it.") from reason

    with ThreadPoolExecutor() as pool:
        list(pool.map(decode, range(len(files))))
    return x


def _placed_by_hand(name: str, example: str, image_size: int | None) -> Dataset:
    folder = data_folder() / name
    if not folder.is_dir():
        raise DataError(f"{name} is not at {folder}: put its images there as domain/class/*.jpg, such as {example}.")
    return image_folder(folder, image_size or PRETRAINED_SIZE)


@register_data("pacs", "photo, art, cartoon and sketch, 7 classes, 224 x 224, from the folder pacs placed by hand")
def _pacs(image_size: int | None) -> Dataset:
    return _placed_by_hand("pacs", "art_painting/dog/pic_001.jpg", image_size)


@register_data(
    "office-home", "4 domains of office things, 65 classes, 224 x 224, from the folder office-home placed by hand"
)
def _office_home(image_size: int | None) -> Dataset:
    return _placed_by_hand("office-home", "Art/Bed/00001.jpg", image_size)

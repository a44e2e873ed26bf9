"""Data sets with domains: one task under several conditions, such as rotated digits, or photos and sketches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pluribus.data.dataset import Dataset, resize
from pluribus.data.datasets import data_folder, entries, load, register_data
from pluribus.data.files import is_sheet
from pluribus.data.folders import read_image_folder
from pluribus.draws import numpy_rng
from pluribus.errors import DataError, MissingDataError
from pluribus.internal.paths import to_path

ANGLES = (0, 20, 40, 60)
PER_CLASS = 100
PRETRAINED_SIZE = 224


def rotate_images(base: Dataset, per_class: int, angles: Sequence[float], seed: int, independent: bool) -> Dataset:
    """Build one domain per angle: the same random training images of `base`, rotated clockwise by that many degrees.

    Copies of one image share an identity, so that no client trains on a rotated copy of another client's test image.
    `independent`: no identities, so that every domain is split on its own.
    """
    rows = _choose_rows(base, per_class, seed)
    images = [Image.fromarray(image) for image in base.x[rows].permute(0, 2, 3, 1).squeeze(3).numpy()]
    # PIL rotates counterclockwise and fills the corners with 0
    turned = np.stack(
        [np.asarray(image.rotate(-angle, Image.Resampling.BILINEAR)) for angle in angles for image in images]
    )
    x = torch.from_numpy(turned).view(len(turned), *base.x.shape[2:], -1).permute(0, 3, 1, 2).contiguous()
    return Dataset(
        name=f"rotated-{base.name}" + ("-independent" if independent else ""),
        x=x,
        y=base.y[rows].repeat(len(angles)),
        classes=base.classes,
        domain=torch.arange(len(angles)).repeat_interleave(len(rows)),
        domains=tuple(f"M{angle:g}" for angle in angles),
        identity=None if independent else rows.repeat(len(angles)),
    )


def _choose_rows(base: Dataset, per_class: int, seed: int) -> torch.Tensor:
    """Choose `per_class` random training images of each class, class by class."""
    labels = base.y[: base.official].numpy()
    counts = np.bincount(labels, minlength=len(base.classes))
    if counts.min() < per_class:
        scarce = base.classes[int(counts.argmin())]
        raise DataError(
            f"{base.name} has only {counts.min()} training images of class {scarce}, but {per_class} are needed."
        )
    rng = numpy_rng(seed, "rotated", base.name)
    rows = [rng.choice(np.flatnonzero(labels == c), per_class, replace=False) for c in range(len(base.classes))]
    return torch.from_numpy(np.concatenate(rows))


def _rotated_mnist(seed: int, independent: bool) -> Dataset:
    return rotate_images(load("mnist"), PER_CLASS, ANGLES, seed, independent)


register_data("rotated-mnist", "1,000 MNIST digits under 4 angles: domains M0 M20 M40 M60, copies kept in one part")(
    partial(_rotated_mnist, independent=False)
)
register_data("rotated-mnist-independent", "rotated-mnist with every domain split on its own, copies may leak")(
    partial(_rotated_mnist, independent=True)
)


@register_data("rotated-digits", "1,000 embedded digits under 4 angles at 16 x 16: domains M0 M20 M40 M60, no download")
def _rotated_digits(seed: int) -> Dataset:
    # at 8 x 8 strokes are one pixel wide, and a rotation by 40 degrees fills the holes of 4, 6 and 8
    return rotate_images(resize(load("digits"), 16), PER_CLASS, ANGLES, seed, independent=False)


BY_HAND = ("pacs", "office-home")


def find_image_folder(name: str) -> Path | None:
    """The image folder of a data set. None: the data set is not a folder."""
    registered = name.replace("_", "-")
    folder = data_folder() / registered if registered in BY_HAND else to_path(name)
    is_folder = folder.is_dir() and not is_sheet(folder)
    return folder if is_folder and (registered in BY_HAND or registered not in entries()) else None


def _load_folder(name: str, example: str, image_size: int | None) -> Dataset:
    folder = data_folder() / name
    if not folder.is_dir():
        raise MissingDataError(
            f"{name} is not at {folder}: put its images there as domain/class/*.jpg, such as {example}."
        )
    return read_image_folder(folder, image_size or PRETRAINED_SIZE)


register_data("pacs", "photo, art, cartoon and sketch, 7 classes, 224 x 224, from the folder pacs placed by hand")(
    partial(_load_folder, "pacs", "art_painting/dog/pic_001.jpg")
)
register_data(
    "office-home", "4 domains of office things, 65 classes, 224 x 224, from the folder office-home placed by hand"
)(partial(_load_folder, "office-home", "Art/Bed/00001.jpg"))

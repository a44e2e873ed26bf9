"""Augmentation: random changes to training images, as one tensor program without a look at any number.

Every image that a fit visits has a key of its own, and what happens to it is a function of that key alone. Batches,
engines and devices may differ: the images do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pluribus.draws import BITS, uniform_bits
from pluribus.errors import FormatError, UnknownNameError

CROP, FLIP, ERASE = AUGMENTATIONS = ("crop", "flip", "erase")
BORDER = 8  # an image is moved by at most this part of its side: 4 pixels of 32
AREA = (0.04, 0.2)  # of an image, that a rectangle takes
RATIO = 2  # of the rectangle's sides: from 1 : 2 to 2 : 1
FILL = 0.0  # of images in [-1, 1]: middle grey
DRAWS = 8  # per image: two for crop, one for flip, five for erase


class Augment(NamedTuple):
    """Names of augmentations, and one key per image."""

    names: tuple[str, ...]
    keys: Tensor

    @classmethod
    def of(cls, names: tuple[str, ...], key: int, images: int, device: torch.device) -> Augment | None:
        """For so many images, in the order of visits; None where nothing is to be changed."""
        return cls(names, torch.arange(images, device=device) + (key >> 1)) if names else None

    def part(self, start: int, end: int) -> Augment:
        """For these images alone."""
        return Augment(self.names, self.keys[start:end])

    def split(self, sizes: Sequence[int]) -> list[Augment]:
        """For batches of these sizes."""
        return [Augment(self.names, keys) for keys in torch.split(self.keys, list(sizes))]

    def __call__(self, x: Tensor) -> Tensor:
        """Images (n, channels, height, width), flipped, then partly erased, then moved."""
        height, width = x.shape[2:]
        # Draws of each image, and the row and column that each pixel comes from, in the four dimensions of images.
        bits = uniform_bits(self.keys[:, None], DRAWS, x.device).T[..., None, None, None]
        rows, columns = torch.arange(height, device=x.device)[:, None], torch.arange(width, device=x.device)
        blank = torch.zeros((), dtype=torch.bool, device=x.device)
        if CROP in self.names:
            rows, columns = rows + _moved(bits[0], height), columns + _moved(bits[1], width)
            blank = _outside(rows, height) | _outside(columns, width)
            rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        if ERASE in self.names:
            top, left, high, wide = _rectangle(bits[3:], height, width)
            blank = blank | (_half(bits[3]) & _within(rows, top, high) & _within(columns, left, wide))
        if FLIP in self.names:
            columns = torch.where(_half(bits[2]), width - 1 - columns, columns)
        if CROP in self.names:
            x = x.gather(2, rows.expand_as(x))
        if CROP in self.names or FLIP in self.names:
            x = x.gather(3, columns.expand_as(x))
        return x.masked_fill(blank, FILL)


def augmentations(given: str | Sequence[str]) -> tuple[str, ...]:
    """Names from a list or from text with commas between, in the order in which they are listed here.

    >>> augmentations("flip, crop"), augmentations("")
    (('crop', 'flip'), ())
    """
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    if names == [""]:
        return ()
    for name in names:
        if name not in AUGMENTATIONS:
            raise UnknownNameError(f"--augment must be some of {', '.join(AUGMENTATIONS)}, not {name!r}.")
        if names.count(name) > 1:
            raise FormatError(f"--augment has {name} twice.")
    return tuple(name for name in AUGMENTATIONS if name in names)


def _below(bits: Tensor, numbers: Tensor | int) -> Tensor:
    """A whole number below another."""
    found: Tensor = (bits * numbers) >> BITS
    return found


def _half(bits: Tensor) -> Tensor:
    """True for one half of all draws."""
    return bits < 1 << (BITS - 1)


def _moved(bits: Tensor, side: int) -> Tensor:
    """By how many pixels an image is moved along a side."""
    most = max(1, side // BORDER)
    return _below(bits, 2 * most + 1) - most


def _rectangle(bits: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First row, first column, rows and columns of what is erased.

    Sides are computed in float64, so that no device rounds one to another number of pixels.
    """
    share, turn = bits[1].double() / 2**BITS, bits[2].double() / 2**BITS
    area = (AREA[0] + (AREA[1] - AREA[0]) * share) * (height * width)
    ratio = torch.pow(RATIO, 2 * turn - 1)
    high = (area * ratio).sqrt().round().long().clamp(1, height)
    wide = (area / ratio).sqrt().round().long().clamp(1, width)
    return _below(bits[3], height - high + 1), _below(bits[4], width - wide + 1), high, wide


def _outside(at: Tensor, side: int) -> Tensor:
    return (at < 0) | (at >= side)


def _within(at: Tensor, first: Tensor, size: Tensor) -> Tensor:
    return (at >= first) & (at < first + size)

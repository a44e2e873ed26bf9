"""Augmentation: random changes to training images, as one tensor program that reads no value back to the CPU.

Every image that a fit visits has its own key, and its changes depend on that key alone. So they do not depend on
batches, engines or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pluribus.draws import BITS, uniform_bits
from pluribus.errors import FormatError, MismatchError, UnknownNameError
from pluribus.inputs import MANY, PADDING, UNKNOWN, Kind
from pluribus.internal.devices import double

CROP, FLIP, ERASE = ("crop", "flip", "erase")  # of images
JITTER, SCALE = ("jitter", "scale")  # of signals
DROP = "drop"  # of tokens
AUGMENTS: dict[str, Kind] = {CROP: "image", FLIP: "image", ERASE: "image", JITTER: "signal", SCALE: "signal"}
AUGMENTS[DROP] = "tokens"
AUGMENTATIONS = tuple(AUGMENTS)
NOISE = 0.05  # deviation of jitter, for channels with deviation 1
SPREAD = 0.1  # deviation of the factor by which a signal is scaled
DROPPED = 0.1  # share of tokens that become unknown
BORDER = 8  # an image moves by at most 1/BORDER of its side: 4 pixels of 32
AREA = (0.04, 0.2)  # of the erased rectangle, as a fraction of the image
RATIO = 2  # of the rectangle's sides, at most: from 1 : 2 to 2 : 1
FILL = 0.0  # middle gray, because images are in [-1, 1]
DRAWS = 8  # per image: two for crop, one for flip, five for erase


class Augment(NamedTuple):
    """Names of augmentations, and one key per image."""

    names: tuple[str, ...]
    keys: Tensor

    @classmethod
    def of(cls, names: tuple[str, ...], key: int, images: int, device: torch.device) -> Augment | None:
        """Keys for this number of images, in the order of visits. None: there are no augmentations."""
        return cls(names, torch.arange(images, device=device) + (key >> 1)) if names else None

    def part(self, start: int, end: int) -> Augment:
        return Augment(self.names, self.keys[start:end])

    def split(self, sizes: Sequence[int]) -> list[Augment]:
        return [Augment(self.names, keys) for keys in torch.split(self.keys, list(sizes))]

    def __call__(self, x: Tensor) -> Tensor:
        """Change rows, by the kind of their augmentations."""
        if AUGMENTS[self.names[0]] == "image":
            return self._change_images(x)
        return self._drop_tokens(x) if DROP in self.names else self._change_signals(x)

    def _change_signals(self, x: Tensor) -> Tensor:
        """Multiply each channel of a signal (n, channels, length) by a factor near 1, then add noise."""
        rows, channels, length = x.shape
        bits = uniform_bits(self.keys[:, None], 2 * channels * (1 + length), x.device)
        draws = _normal(bits).view(rows, channels, -1)
        if SCALE in self.names:
            x = x * (1 + SPREAD * draws[:, :, :1])
        return x + NOISE * draws[:, :, 1:] if JITTER in self.names else x

    def _drop_tokens(self, x: Tensor) -> Tensor:
        """Replace some tokens (n, length) by the unknown one. Padding stays."""
        dropped = uniform_bits(self.keys[:, None], x.shape[1], x.device) < int(DROPPED * 2**BITS)
        return torch.where(dropped & (x != PADDING), UNKNOWN, x)

    def _change_images(self, x: Tensor) -> Tensor:
        """Flip images (n, channels, height, width), then erase a rectangle, then move them."""
        height, width = x.shape[2:]
        # Random bits of each image, and the source row and column of each pixel, in the four dimensions of images.
        bits = uniform_bits(self.keys[:, None], DRAWS, x.device).T[..., None, None, None]
        rows, columns = torch.arange(height, device=x.device)[:, None], torch.arange(width, device=x.device)
        blank = torch.zeros((), dtype=torch.bool, device=x.device)
        if CROP in self.names:
            moved = rows + _offset(bits[0], height), columns + _offset(bits[1], width)
            rows, columns = moved[0].clamp(0, height - 1), moved[1].clamp(0, width - 1)
            blank = (rows != moved[0]) | (columns != moved[1])
        if ERASE in self.names:
            top, left, high, wide = _rectangle(bits[3:], height, width)
            blank = blank | (_toss_coin(bits[3]) & _is_within(rows, top, high) & _is_within(columns, left, wide))
        if FLIP in self.names:
            columns = torch.where(_toss_coin(bits[2]), width - 1 - columns, columns)
        if CROP in self.names:
            x = x.gather(2, rows.expand_as(x))
        if CROP in self.names or FLIP in self.names:
            x = x.gather(3, columns.expand_as(x))
        return x.masked_fill(blank, FILL)


def parse_augmentations(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parse names from a list or from comma-separated text. The result has the order of `AUGMENTATIONS`.

    >>> parse_augmentations("flip, crop"), parse_augmentations("")
    (('crop', 'flip'), ())
    """
    if not isinstance(given, str | Sequence):
        raise FormatError(f"--augment must be some of {', '.join(AUGMENTATIONS)}, not {given!r:.80}.")
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    if names == [""]:
        return ()
    for name in names:
        if name not in AUGMENTATIONS:
            raise UnknownNameError(f"--augment must be some of {', '.join(AUGMENTATIONS)}, not {name!r}.")
        if names.count(name) > 1:
            raise FormatError(f"--augment names {name} twice.")
    return tuple(name for name in AUGMENTATIONS if name in names)


def check_augmentations(names: Sequence[str], kind: Kind) -> None:
    """Refuse augmentations that are for another kind of rows."""
    if wrong := [name for name in names if AUGMENTS[name] != kind]:
        known = ", ".join(name for name, of in AUGMENTS.items() if of == kind) or "none"
        raise MismatchError(
            f"--augment {wrong[0]} is for {MANY[AUGMENTS[wrong[0]]]}, but the data are {MANY[kind]}. For them there is "
            f"{known}."
        )


def _draw_below(bits: Tensor, numbers: Tensor | int) -> Tensor:
    """A random whole number below `numbers`."""
    found: Tensor = (bits * numbers) >> BITS
    return found


def _normal(bits: Tensor) -> Tensor:
    """Normal numbers from twice as many uniform bits, by the transform of Box and Muller."""
    low, high = (((double(bits[..., at::2]) + 0.5) / 2**BITS) for at in (0, 1))
    found: Tensor = (-2 * low.log()).sqrt() * torch.cos(2 * torch.pi * high)
    return found.float().to(bits.device)


def _toss_coin(bits: Tensor) -> Tensor:
    """True for one half of all draws."""
    return bits < 1 << (BITS - 1)


def _offset(bits: Tensor, side: int) -> Tensor:
    """The number of pixels by which an image moves along a side."""
    most = max(1, side // BORDER)
    return _draw_below(bits, 2 * most + 1) - most


def _rectangle(bits: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First row, first column, height and width of the erased rectangle."""
    # in float64, so that all devices round the sides to the same number of pixels
    share, turn = double(bits[1]) / 2**BITS, double(bits[2]) / 2**BITS
    area = (AREA[0] + (AREA[1] - AREA[0]) * share) * (height * width)
    ratio = torch.pow(RATIO, 2 * turn - 1)
    high = (area * ratio).sqrt().round().long().clamp(1, height).to(bits.device)
    wide = (area / ratio).sqrt().round().long().clamp(1, width).to(bits.device)
    return _draw_below(bits[3], height - high + 1), _draw_below(bits[4], width - wide + 1), high, wide


def _is_within(at: Tensor, first: Tensor, size: Tensor) -> Tensor:
    return (at >= first) & (at < first + size)

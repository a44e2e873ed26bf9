"""Batches: their content, their sizes, and how many are gathered at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pluribus.data.augment import Augment
from pluribus.data.federated import Data
from pluribus.inputs import Input
from pluribus.models.probe import normalized_pixels

LEAST_NUMBERS = 8  # that a batch normalization needs per channel
CHUNK = 2**22  # floats gathered at once: one gather serves many small batches, and memory stays small for large images


class Batch(NamedTuple):
    """Rows, labels, their positions in the set, and the number of rows as a Python number."""

    x: Tensor
    y: Tensor
    i: Tensor
    n: int


def least_rows(model: nn.Module, shape: Input) -> int:
    """Rows that a batch needs so that a model can learn from it.

    Gradients explode if a layer normalizes over few numbers. The median gradient norm of a MobileNetV2 on 32 x 32
    images is 59 with ten images in a batch, 87 with eight, 1,000 with four and 800,000 with two.
    """
    pixels = normalized_pixels(model, shape)
    return 2 if pixels is None else max(2, math.ceil(LEAST_NUMBERS / pixels))


def batch_sizes(samples: int, batch: int, least: int = 2) -> list[int]:
    """Sizes of the batches of one epoch. A remainder of fewer than `least` joins the batch before it.

    >>> batch_sizes(25, 10), batch_sizes(21, 10), batch_sizes(1, 10), batch_sizes(0, 10)
    ([10, 10, 5], [10, 11], [1], [])
    >>> batch_sizes(23, 10, least=4)
    [10, 13]
    """
    full, rest = divmod(samples, batch)
    sizes = [batch] * full + ([rest] if rest else [])
    if full and 0 < rest < least:
        sizes[-2:] = [batch + rest]
    return sizes


def gather(data: Data, order: Tensor, sizes: list[int], augment: Augment | None = None) -> Iterator[Batch]:
    """Batches of these sizes. Many are gathered from the store at once."""
    if not sizes:
        return
    chunk = max(1, CHUNK // (data.store.x[0].numel() * max(sizes)))
    start = 0
    for first in range(0, len(sizes), chunk):
        group = sizes[first : first + chunk]
        end = start + sum(group)
        positions = order[start:end]
        x, y = data.take(positions, None if augment is None else augment.part(start, end))
        start = end
        for bx, by, bi in zip(*(torch.split(part, group) for part in (x, y, positions)), strict=True):
            yield Batch(bx, by, bi, len(bi))

"""Batches: what a step sees, how long each is, and how many are gathered at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pluribus.data.federated import Data

# Normalising by the statistics of two or three rows makes gradients explode: a MobileNetV2 on 32 x 32 images has 10,000
# times its usual one with a batch of two.
FEWEST = 4
CHUNK = 2**22  # floats gathered at once: one gather serves many small batches, and memory stays small for large images


class Batch(NamedTuple):
    """Images, labels, their positions in the set, and the number of rows as a Python number."""

    x: Tensor
    y: Tensor
    i: Tensor
    n: int


def batch_sizes(samples: int, batch: int) -> list[int]:
    """Sizes of the batches of one epoch. A remainder of fewer than four joins the batch before it.

    >>> batch_sizes(25, 10), batch_sizes(23, 10), batch_sizes(1, 10), batch_sizes(0, 10)
    ([10, 10, 5], [10, 13], [1], [])
    """
    full, rest = divmod(samples, batch)
    sizes = [batch] * full + ([rest] if rest else [])
    if full and 0 < rest < FEWEST:
        sizes[-2:] = [batch + rest]
    return sizes


def gathered(data: Data, order: Tensor, sizes: list[int]) -> Iterator[Batch]:
    """Batches of these sizes, gathered from the store many at a time."""
    if not sizes:
        return
    chunk = max(1, CHUNK // (data.store.x[0].numel() * max(sizes)))
    start = 0
    for first in range(0, len(sizes), chunk):
        group = sizes[first : first + chunk]
        positions = order[start : start + sum(group)]
        start += len(positions)
        x, y = data.take(positions)
        for bx, by, bi in zip(*(torch.split(part, group) for part in (x, y, positions)), strict=True):
            yield Batch(bx, by, bi, len(bi))

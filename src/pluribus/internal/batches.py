"""Batches: their content, their sizes, and how many are gathered at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pluribus.data.augment import Augment
from pluribus.data.federated import Data
from pluribus.inputs import Input
from pluribus.internal.devices import is_apple
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
    groups = [sizes[first : first + chunk] for first in range(0, len(sizes), chunk)]
    ends = [0, *accumulate(map(sum, groups))]

    def take(start: int, end: int) -> tuple[Tensor, Tensor]:
        return data.take(order[start:end], None if augment is None else augment.part(start, end))

    at_once = data.store.resident or is_apple(data.store.device)  # an Apple GPU is used by one thread alone
    taken = map(take, ends, ends[1:]) if at_once else _ahead(take, ends)
    for (x, y), group, start, end in zip(taken, groups, ends, ends[1:], strict=False):
        positions = order[start:end].to(x.device, non_blocking=True)
        for bx, by, bi in zip(*(torch.split(part, group) for part in (x, y, positions)), strict=True):
            yield Batch(bx, by, bi, len(bi))


def _ahead(take: Callable[[int, int], tuple[Tensor, Tensor]], ends: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Take rows from the host in another thread, one part ahead, on the stream of this thread."""
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def take_on_stream(start: int, end: int) -> tuple[Tensor, Tensor]:
        with nullcontext() if stream is None else torch.cuda.stream(stream):  # which fails on a Mac without a stream
            return take(start, end)

    with ThreadPoolExecutor(1, "ahead") as thread:
        parts = [(start, end) for start, end in pairwise(ends)]
        waiting = thread.submit(take_on_stream, *parts[0])
        for following in [*parts[1:], None]:
            taken = waiting.result()
            if following is not None:
                waiting = thread.submit(take_on_stream, *following)
            yield taken

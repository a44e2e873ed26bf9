"""Poisson sampling in batches of fixed shape.

Each row is part of a batch with the same probability, independently of all others: so batches have no fixed size. A
batch is therefore visited in chunks of one size, which a GPU records once. The last chunk is padded with the position
-1, and what such a row gives is multiplied by 0. No row is dropped, however large a batch is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PADDING = -1
_UNIFORM = 2.0**-53


class Batches(NamedTuple):
    """Positions of all chunks, one after the other, and for each chunk whether it is the last one of its batch."""

    order: Tensor
    sizes: list[int]
    ends: list[bool]


def chunk_size(batch: int, rows: int) -> int:
    """Rows of a chunk: 1.5 standard deviations above the mean batch, so that one batch in twenty needs a second one."""
    return min(rows, batch + math.ceil(1.5 * math.sqrt(batch)))


def draw_batches(rows: int, batch: int, steps: int, uniform: Callable[[int], Tensor]) -> Batches:
    """Draw the batches of some steps. `uniform` gives so many numbers in [0, 1)."""
    rate, chunk = min(1.0, batch / rows), chunk_size(batch, rows)
    parts: list[Tensor] = []
    ends: list[bool] = []
    for _ in range(steps):
        chosen = (uniform(rows) < rate).nonzero().flatten()
        chunks = max(1, -(-len(chosen) // chunk))  # an empty batch is a step, too: it has noise
        parts.append(torch.nn.functional.pad(chosen, (0, chunks * chunk - len(chosen)), value=PADDING))
        ends += [False] * (chunks - 1) + [True]
    return Batches(torch.cat(parts), [chunk] * len(ends), ends)


class Randomness:
    """Uniform and normal numbers: by a key, so that runs can be repeated, or from the operating system."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        """`seed=None`: from the operating system."""
        self._secure, self._device = seed is None, device
        self._host, self._generator = torch.Generator(), torch.Generator(device)
        for generator in (self._host, self._generator):
            generator.manual_seed(seed or 0)

    def uniform(self, size: int) -> Tensor:
        """Numbers in [0, 1), on the CPU."""
        if self._secure:
            return torch.from_numpy(_system_uniform(size))
        return torch.rand(size, generator=self._host, dtype=torch.float64)

    def fill_normal(self, into: Tensor) -> None:
        """Fill a tensor with standard normal numbers."""
        if self._secure:
            into.copy_(torch.from_numpy(_system_normal(into.numel())).view(into.shape))
        else:
            into.normal_(generator=self._generator)


def _system_uniform(size: int) -> np.ndarray:
    bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
    found: np.ndarray = (bits >> np.uint64(11)).astype(np.float64) * _UNIFORM
    return found


def _system_normal(size: int) -> np.ndarray:
    """The transform of Box and Muller. Each number is a mean of two that are scaled: single doubles have gaps, which
    could give away what was added to them (Holohan and Braghin, 2021)."""
    radius, angle = _system_uniform(2 * size), _system_uniform(2 * size)
    drawn = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)
    found: np.ndarray = (drawn[:size] + drawn[size:]) / math.sqrt(2)
    return found

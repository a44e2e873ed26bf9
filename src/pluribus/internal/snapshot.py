"""Copies of many tensors, to be restored in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class _Location(NamedTuple):
    """Position and layout of a copy in its block."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Snapshot:
    """Copies in one block of memory per dtype, so that a GPU copies a thousand tensors in a few calls."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._locations: dict[str, _Location] = {}
        sizes: dict[torch.dtype, int] = {}
        for name, value in tensors.items():
            offset = sizes.get(value.dtype, 0)
            self._locations[name] = _Location(value.dtype, tuple(value.shape), _stride(value), offset)
            sizes[value.dtype] = offset + value.numel()
        device = next(iter(tensors.values())).device if tensors else None
        self._blocks = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self._copies = self._views(self._blocks)
        copy_all(self._copies, tensors)

    def put_back(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the live tensors of these names in place; their addresses stay."""
        copy_all(tensors, self._copies)

    def tensors(self) -> dict[str, Tensor]:
        """The copies, on the CPU, each in memory of its own."""
        views = self._views({dtype: block.to("cpu") for dtype, block in self._blocks.items()})
        return {name: value.clone(memory_format=torch.contiguous_format) for name, value in views.items()}

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())

    def _views(self, blocks: Mapping[torch.dtype, Tensor]) -> dict[str, Tensor]:
        return {n: blocks[p.dtype].as_strided(p.shape, p.stride, p.offset) for n, p in self._locations.items()}


@torch.no_grad()
def copy_all(to: Mapping[str, Tensor], from_: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, with one call per dtype."""
    by_type: dict[torch.dtype, list[str]] = {}
    for name, value in to.items():
        by_type.setdefault(value.dtype, []).append(name)
    for names in by_type.values():
        torch._foreach_copy_([to[name] for name in names], [from_[name] for name in names])


def _stride(value: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its memory has no gaps: equal layouts are copied in one call."""
    dense = value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))
    return tuple(value.stride() if dense else torch.empty(value.shape, device="meta").stride())

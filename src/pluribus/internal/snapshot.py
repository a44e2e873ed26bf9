"""Copies of many tensors, to be restored in place, and tensors that share blocks of memory so that copies are cheap."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from functools import cache
from itertools import islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Tensors start at multiples of this many bytes, as in memory of their own: some kernels depend on the alignment.
ALIGNMENT = 512


class _Location(NamedTuple):
    """Position and layout of a tensor in its block."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Packed(dict[str, Tensor]):
    """Live tensors by name, in one block of memory per dtype. A GPU copies all of them in a few calls."""

    def __init__(
        self, tensors: Mapping[str, Tensor], locations: dict[str, _Location], blocks: Mapping[torch.dtype, Tensor]
    ) -> None:
        super().__init__(tensors)
        self.locations = locations
        self.blocks = {dtype: blocks[dtype][:end] for dtype, end in _ends(locations).items()}

    def first(self, number: int) -> Packed:
        """The first tensors, which are at the start of the blocks."""
        return Packed(dict(islice(self.items(), number)), dict(islice(self.locations.items(), number)), self.blocks)


def pack(tensors: Mapping[str, Tensor]) -> Packed | None:
    """Move the memory of these tensors into common blocks. The tensors themselves, such as parameters, stay.

    None: some of them overlap, as tied weights do. Nothing is moved.
    """
    spans = sorted((value.data_ptr(), value.nbytes) for value in tensors.values() if value.nbytes)
    if not tensors or any(start + size > after for (start, size), (after, _) in pairwise(spans)):
        return None
    locations = _lay_out(tensors, ALIGNMENT)
    device = next(iter(tensors.values())).device
    blocks = {dtype: torch.zeros(end, dtype=dtype, device=device) for dtype, end in _ends(locations).items()}
    copies = {name: _take_part(blocks[one.dtype], one) for name, one in locations.items()}
    copy_all(copies, tensors)
    for name, value in tensors.items():
        value.data = copies[name]
        weakref.finalize(value, _hold, blocks[value.dtype])  # the part itself does not keep the block
    return Packed(copies, locations, blocks)


def _take_part(block: Tensor, one: _Location) -> Tensor:
    """A tensor with a storage of its own, over a part of a block. It is no view: for each view, torch's forward mode
    allocates as much memory as the whole block has."""
    size, start = torch.Size(one.shape).numel() * block.itemsize, one.offset * block.itemsize
    storage = torch._C._construct_storage_from_data_pointer(block.data_ptr() + start, block.device, size)
    return torch.empty(0, dtype=block.dtype, device=block.device).set_(storage, 0, one.shape, one.stride)


def _hold(block: Tensor) -> None:
    """The argument of a finalizer stays in memory until its object is gone."""


class Snapshot:
    """Copies in one block of memory per dtype, so that a GPU copies a thousand tensors in a few calls."""

    def __init__(self, tensors: Mapping[str, Tensor], alignment: int = 1, pinned: bool = False) -> None:
        """Copy tensors, each to a multiple of `alignment` bytes. `pinned`: where a GPU copies from fast."""
        if isinstance(tensors, Packed):
            self._locations = tensors.locations
            self._blocks = {dtype: block.clone() for dtype, block in tensors.blocks.items()}
            return
        self._locations = _lay_out(tensors, alignment)
        devices = {
            value.dtype: value.device for value in tensors.values()
        }  # float64 stays on the CPU beside an Apple GPU
        self._blocks = {
            dtype: torch.empty(size, dtype=dtype, device=devices[dtype], pin_memory=pinned)
            for dtype, size in _ends(self._locations).items()
        }
        copy_all(self.views(), tensors)

    def views(self) -> dict[str, Tensor]:
        """The copies themselves, by name."""
        return _views(self._locations, self._blocks)

    def to(self, device: torch.device) -> Snapshot:
        """The same copies on another device."""
        moved = copy.copy(self)
        moved._blocks = {dtype: block.to(device, non_blocking=True) for dtype, block in self._blocks.items()}
        return moved

    def put_back(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the live tensors of these names in place; their addresses stay."""
        if isinstance(tensors, Packed) and tensors.locations == self._locations:
            for dtype, block in tensors.blocks.items():
                block.copy_(self._blocks[dtype])
        else:
            copy_all(tensors, self.views())

    def tensors(self) -> dict[str, Tensor]:
        """The copies, on the CPU and contiguous. They share memory with each other, and perhaps with this object."""
        locations, blocks = self._locations, self._blocks
        if any(one.stride != _contiguous(one.shape) for one in locations.values()):
            # the device brings them into order: a CPU takes many times as long
            locations = _lay_out(self.views(), contiguous=True)
            blocks = {d: torch.empty(end, dtype=d, device=blocks[d].device) for d, end in _ends(locations).items()}
            copy_all(_views(locations, blocks), self.views())
        return _views(locations, {dtype: block.to("cpu") for dtype, block in blocks.items()})

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self._blocks.values())


@torch.no_grad()
def copy_all(to: Mapping[str, Tensor], from_: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, with one call per dtype."""
    by_type: dict[torch.dtype, list[str]] = {}
    for name, value in to.items():
        by_type.setdefault(value.dtype, []).append(name)
    for names in by_type.values():
        torch._foreach_copy_([to[name] for name in names], [from_[name] for name in names])


def _lay_out(tensors: Mapping[str, Tensor], alignment: int = 1, contiguous: bool = False) -> dict[str, _Location]:
    """Places in one block per dtype, in the order of names. Each starts at a multiple of `alignment` bytes."""
    locations: dict[str, _Location] = {}
    ends: dict[torch.dtype, int] = {}
    for name, value in tensors.items():
        unit = max(1, alignment // value.itemsize)
        offset = -(-ends.get(value.dtype, 0) // unit) * unit
        shape = tuple(value.shape)
        locations[name] = _Location(value.dtype, shape, _contiguous(shape) if contiguous else _stride(value), offset)
        ends[value.dtype] = offset + value.numel()
    return locations


def _ends(locations: Mapping[str, _Location]) -> dict[torch.dtype, int]:
    """Number of elements of each block."""
    ends: dict[torch.dtype, int] = {}
    for one in locations.values():
        ends[one.dtype] = max(ends.get(one.dtype, 0), one.offset + torch.Size(one.shape).numel())
    return ends


def _views(locations: Mapping[str, _Location], blocks: Mapping[torch.dtype, Tensor]) -> dict[str, Tensor]:
    return {n: blocks[p.dtype].as_strided(p.shape, p.stride, p.offset) for n, p in locations.items()}


def _stride(value: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if its memory has no gaps: equal layouts are copied in one call."""
    dense = value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))
    return tuple(value.stride()) if dense else _contiguous(tuple(value.shape))


@cache
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())

"""Named tensors and modules that a method keeps with a client or the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class State(nn.Module):
    """An attribute tree of tensors and modules, fixed once it is made: saved by name, restored in place.

    A tensor that is set again is written into the one that is there, so that its address stays.

    >>> state = State()
    >>> state.count = torch.zeros(3)
    >>> state.count = state.count + 1
    >>> state.count
    tensor([1., 1., 1.])
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
        elif name not in self._buffers:
            self.register_buffer(name, value)
        else:
            restore({name: getattr(self, name)}, {name: value}, "state")

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def restore(target: Mapping[str, Tensor], source: Mapping[str, Tensor], what: str) -> None:
    """Copy saved tensors into live ones of the same names and shapes; addresses stay."""
    if target.keys() != source.keys():
        raise KeyError(f"{what}: saved and live names differ: {sorted(target.keys() ^ source.keys())}")
    for name, value in target.items():
        if value.shape != source[name].shape:  # copy_ would broadcast
            raise ValueError(f"{what}: '{name}' has shape {tuple(value.shape)}, not {tuple(source[name].shape)}")
    with torch.no_grad():
        for name, value in target.items():
            value.copy_(source[name])

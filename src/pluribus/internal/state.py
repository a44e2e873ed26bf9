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

    _fixed = False

    def fix(self) -> None:
        """No new names from now on: what is not there from the start could not be restored."""
        self._fixed = True

    @property
    def fixed(self) -> bool:
        """Whether all names are there."""
        return self._fixed

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" or name.startswith("_"):  # torch's own
            super().__setattr__(name, value)
            return
        if not isinstance(value, Tensor | nn.Module):
            raise TypeError(f"state.{name} is of type {type(value).__name__}: only tensors and modules are saved")
        if self._fixed and not hasattr(self, name):
            raise AttributeError(f"state.{name} is new: allocate it in prepare (clients) or setup (server)")
        if isinstance(value, nn.Parameter | nn.Module):
            super().__setattr__(name, value)
        elif name in self._buffers:
            restore({name: getattr(self, name)}, {name: value}, "state")
        else:
            self.register_buffer(name, value)

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

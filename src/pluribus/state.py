"""Named tensors and modules that a method keeps with a client or the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class State(nn.Module):
    """An attribute tree of tensors and modules, fixed once it is made: saved by name, restored in place.

    >>> state = State()
    >>> state.count = torch.zeros(3)
    >>> list(state.state_dict())
    ['count']
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and name not in self._buffers:
            self.register_buffer(name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def restore(target: Mapping[str, Tensor], source: Mapping[str, Tensor], what: str) -> None:
    """Copy saved tensors into live ones of the same names and shapes; addresses stay."""
    if target.keys() != source.keys():
        raise KeyError(f"{what}: saved and live names differ: {sorted(target.keys() ^ source.keys())}")
    with torch.no_grad():
        for name, value in target.items():
            value.copy_(source[name])

"""Named tensors and modules that a method keeps with a client or the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pluribus.message import Rows


class State(nn.Module):
    """Tensors and modules as attributes, saved by name and restored in place. `fix` allows no new names.

    Setting a tensor again copies the value into the existing one, so that its address stays. This also holds for the
    tensors of `Rows` and of a dict, whose names may have dots. Both are read as they were set, with live tensors.

    >>> state = State()
    >>> state.count = torch.zeros(3)
    >>> state.count = state.count + 1
    >>> state.count
    tensor([1., 1., 1.])
    >>> state.means = {"head.bias": torch.zeros(2)}
    >>> state.means["head.bias"] += 1
    >>> state.means["head.bias"]
    tensor([1., 1.])
    """

    _fixed = False

    def fix(self) -> None:
        """Refuse new names from now on: they could not be restored."""
        self._fixed = True

    @property
    def fixed(self) -> bool:
        return self._fixed

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" or name.startswith("_"):  # attributes of torch
            super().__setattr__(name, value)
            return
        if not isinstance(value, Tensor | nn.Module | Rows | Mapping):
            raise TypeError(f"state.{name} is of type {type(value).__name__}: only tensors and modules are saved")
        if self._fixed and not hasattr(self, name):
            raise AttributeError(f"state.{name} is new: allocate it in prepare (clients) or setup (server)")
        if isinstance(value, nn.Parameter | nn.Module):
            super().__setattr__(name, value)
        elif isinstance(value, Tensor) and name not in self._buffers:
            self.register_buffer(name, value)
        elif isinstance(value, Tensor):
            restore({name: getattr(self, name)}, {name: value}, "state")
        elif isinstance(group := self._modules.get(name), _Group):
            restore(group.tensors(), _parts(value), f"state.{name}")
        else:
            super().__setattr__(name, _Group(value))

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value.read() if isinstance(value, _Group) else value


class _Group(nn.Module):
    """The tensors of `Rows` or of a dict, as buffers."""

    def __init__(self, value: Rows | Mapping[str, Tensor]) -> None:
        super().__init__()
        self._rows = isinstance(value, Rows)
        self._slots = {name: name.replace(".", "/") for name in _parts(value)}  # torch allows no dots here
        if len(set(self._slots.values())) < len(self._slots):
            raise ValueError(f"names must differ in more than '.' and '/': {sorted(self._slots)}")
        for name, part in _parts(value).items():
            self.register_buffer(self._slots[name], part)

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(slot) for name, slot in self._slots.items()}

    def read(self) -> Rows | Tensors:
        """The value as it was set, with live tensors."""
        return Rows(**self.tensors()) if self._rows else Tensors(self.tensors())


class Tensors(Mapping[str, Tensor]):
    """A dict of a state, with live tensors. Setting a tensor copies the value into the existing one."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._live = live

    def __getitem__(self, name: str) -> Tensor:
        return self._live[name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        restore({name: self._live[name]}, {name: value}, "state")

    def __iter__(self) -> Iterator[str]:
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)


def _parts(value: Rows | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"value": value.value, "held": value.held} if isinstance(value, Rows) else value


def restore(target: Mapping[str, Tensor], source: Mapping[str, Tensor], what: str) -> None:
    """Copy saved tensors into live ones with the same names and shapes. Addresses stay."""
    if target.keys() != source.keys():
        raise KeyError(f"{what}: saved and live names differ: {sorted(target.keys() ^ source.keys())}")
    for name, value in target.items():
        if value.shape != source[name].shape:  # copy_ would broadcast
            raise ValueError(f"{what}: '{name}' has shape {tuple(value.shape)}, not {tuple(source[name].shape)}")
    with torch.no_grad():
        for name, value in target.items():
            value.copy_(source[name])

"""A pretended Apple GPU, because no real one is at hand. Numbers stay on the CPU, in tensors that say `mps`.

It refuses what a real one refuses: float64, tensors of two devices in one operation, generators of the CPU, and numpy.
What its kernels compute, and how fast, it cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

MPS = torch.device("mps", 0)
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)  # from any device to any other
INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)  # rows may be numbered on the CPU


class OnApple(Tensor):
    """A tensor that says it is on an Apple GPU."""

    @staticmethod
    def __new__(cls, held: Tensor) -> OnApple:
        if held.dtype == torch.float64:
            raise TypeError("an Apple GPU has no float64")
        facts = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return Tensor._make_wrapper_subclass(cls, held.shape, requires_grad=held.requires_grad, **facts)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    device = property(lambda self: MPS)

    def __repr__(self) -> str:
        return f"OnApple({self.held})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in COPIES + INDEXED:
            _check_devices(function, (args, kwargs))
        found = function(*_held(args), **_held(kwargs))
        if function in COPIES and not isinstance(tree_leaves(args)[0], OnApple):
            return None if found is None else args[0]
        made = tree_map_only(Tensor, OnApple, found)
        return return_and_correct_aliasing(function, args, kwargs, made)


class _Move(torch.autograd.Function):
    """Wraps a tensor, or unwraps it; its gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, on_apple: bool) -> Tensor:
        ctx.was = isinstance(value, OnApple)
        held = _held(value).clone()
        return OnApple(held) if on_apple else held

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Move.apply(gradient, ctx.was), None


class _Names(TorchFunctionMode):
    """Understands devices by their names, wherever a function takes one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (Tensor.cpu, Tensor.numpy):
            if function is Tensor.numpy and isinstance(args[0], OnApple):
                raise TypeError("a tensor on an Apple GPU has no array: copy it to the CPU first")
            return _move(args[0], False) if function is Tensor.cpu else function(*args, **kwargs)
        if function is Tensor.tolist:
            return function(_move(args[0], False))
        if function is Tensor.to:
            return self._to(*args, **kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "mps":
            found = function(*args, **kwargs)
            return _move(found, False) if device is not None and isinstance(found, OnApple) else found
        if kwargs.get("generator") is not None:
            raise RuntimeError("an Apple GPU takes no generator of the CPU")
        return _move(function(*args, **kwargs | {"device": "cpu"}), True)

    def _to(self, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        devices = [one.device if isinstance(one, Tensor) else one for one in (*args, kwargs.pop("device", None))]
        devices = [one for one in devices if isinstance(one, str | torch.device)]
        dtypes = [
            one.dtype if isinstance(one, Tensor) else one for one in args if isinstance(one, torch.dtype | Tensor)
        ]
        on_apple = torch.device(devices[0]).type == "mps" if devices else isinstance(value, OnApple)
        if isinstance(value, OnApple) and not on_apple:
            value = _move(value, False)
        kwargs |= {"dtype": dtypes[0]} if dtypes else {}
        value = value.to(**kwargs) if kwargs else value
        return _move(value, on_apple)


def _move(value: Tensor, on_apple: bool) -> Tensor:
    return value if isinstance(value, OnApple) is on_apple else _Move.apply(value, on_apple)


def _held(values: Any) -> Any:
    return tree_map_only(OnApple, lambda one: one.held, values)


def _check_devices(function: Any, values: Any) -> None:
    given = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    if strange := [one for one in given if not isinstance(one, OnApple) and one.dim()]:
        raise RuntimeError(
            f"{function} gets tensors on an Apple GPU and one of shape {tuple(strange[0].shape)} on the CPU"
        )


@contextmanager
def apple_gpu() -> Iterator[None]:
    """Pretend that torch has an Apple GPU."""
    with pytest.MonkeyPatch.context() as patch, _Names():
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        patch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: True)  # asked by autocast of torch 2.8
        patch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)  # not their memory
        for name in ("get_rng_state", "set_rng_state", "manual_seed"):
            patch.setattr(torch.mps, name, lambda *state: None)
        yield

"""Models on the meta device: all names and shapes, no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# What constructors fill tensors with. On the meta device there is nothing to fill, but each call takes a while, and the
# first one imports torch's compiler, which takes a second. So does any other arithmetic there: constructors of this
# library do theirs in place, with these.
_METHODS = ("normal_", "uniform_", "fill_", "zero_", "erfinv_", "clamp_", "mul_", "add_")
_INITIALIZERS = ("normal_", "uniform_", "constant_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_")
FILLING = {getattr(Tensor, name) for name in _METHODS} | {getattr(nn.init, name) for name in _INITIALIZERS}


class _WithoutNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FILLING:
            filled: Tensor = args[0] if args else kwargs["tensor"]
            if filled.is_meta:
                return filled
        return func(*args, **(kwargs or {}))


@contextmanager
def without_numbers() -> Iterator[None]:
    """Build models on the meta device."""
    with torch.device("meta"), _WithoutNumbers():
        yield

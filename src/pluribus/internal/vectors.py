"""The numbers of a message as one vector, measured from what was downloaded under the same names.

Lengths and differences are computed in double precision: squares of large numbers overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def floats(fields: Tensors) -> dict[str, Tensor]:
    """The tensors of floating-point numbers."""
    return {n: value for n, value in fields.items() if value.is_floating_point()}


def starts(sent: Tensors, about: Tensors) -> dict[str, Tensor]:
    """What a client started from, of the tensors that it sent."""
    return {n: about[n] for n, value in sent.items() if n in about and about[n].shape == value.shape}


def length(vector: Tensors, start: Tensors) -> float:
    """The distance of a vector to its start. What has no start is measured from zero."""
    return math.sqrt(math.fsum(float(_move(v, start.get(name)).square().sum()) for name, v in vector.items()))


def shortened(vector: Tensors, start: Tensors, factor: float) -> dict[str, Tensor]:
    """The vector at so much of its distance to its start, in double precision."""
    return {name: start.get(name, 0.0) + _move(value, start.get(name)) * factor for name, value in vector.items()}


def bounded(value: Tensor, least: float | None, most: float | None) -> Tensor:
    """The same numbers within what a valid message may hold."""
    known = torch.finfo(value.dtype)
    lowest, highest = (known.min if least is None else least), (known.max if most is None else most)
    down, up = value.new_tensor(lowest), value.new_tensor(highest)
    if float(up) > highest:  # rounded up
        up = up.nextafter(down)
    if float(down) < lowest:
        down = down.nextafter(up)
    return value.clamp(down, up)


def _move(value: Tensor, start: Tensor | None) -> Tensor:
    return value.double() if start is None else value.double() - start.double()

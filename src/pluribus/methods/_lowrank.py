"""Matrices sent as the factors of a truncated singular value decomposition, where that is less to send.

A convolution's kernel counts as a matrix of one row per output channel. What has one dimension, counts instead of
measures, or would grow by being factored travels whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pluribus.errors import SchemaError
from pluribus.message import Dim, Field, Message

Tensors = Mapping[str, Tensor]


class Factors(NamedTuple):
    """U (m, r), sigma (r) and V^T (r, n) of a matrix."""

    u: Tensor
    s: Tensor
    v: Tensor

    def matrix(self) -> Tensor:
        """U diag(sigma) V^T in double precision, so that every party rounds to the same numbers."""
        u, s, v = (factor.double() for factor in self)
        return (u * s) @ v


def most_rank(shape: tuple[int, ...]) -> int:
    """The largest r of which r (m + n + 1) numbers are fewer than m n; 0 where there is none."""
    if len(shape) < 2 or not math.prod(shape):
        return 0
    m, n = shape[0], math.prod(shape[1:])
    return (m * n - 1) // (m + n + 1)


def rank(sigma: Tensor, energy: float) -> int:
    """The smallest r >= 1 whose singular values hold this share of the sum of squares."""
    held = sigma.double().square().cumsum(0)
    return int((held < energy * held[-1]).sum()) + 1


def factorise(value: Tensor, energy: float) -> Factors | None:
    """The fewest factors that hold this share of the squared norm; None: the tensor itself is no larger.

    On the CPU and in double precision: the rank is a decision, and should not depend on rounding.
    """
    most = most_rank(tuple(value.shape)) if value.is_floating_point() else 0
    matrix = value.detach().cpu().double().flatten(1) if most else value
    if not most or not bool(matrix.isfinite().all()):  # numbers that are none are refused where they are sent
        return None
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    r = rank(s, energy)
    return Factors(*(factor.to(value.dtype) for factor in (u[:, :r], s[:r], v[:r]))) if r <= most else None


def fields(tensors: Tensors) -> dict[str, Field]:
    """What `packed` may send of these."""
    found: dict[str, Field] = {}
    for name, value in tensors.items():
        shape, most = tuple(value.shape), most_rank(tuple(value.shape)) if value.is_floating_point() else 0
        found[name] = Field(shape, value.dtype, kept=False, optional=most > 0)
        if most:
            r, m, n = Dim(f"{name} rank", most), shape[0], math.prod(shape[1:])
            for factor, size in {"u": (m, r), "s": (r,), "v": (r, n)}.items():
                found[f"{name}.{factor}"] = Field(size, value.dtype, kept=False, optional=True)
    return found


def packed(tensors: Tensors, energy: float, since: Tensors) -> dict[str, Tensor]:
    """Tensors, each by the factors of what it became since then, or whole. Without a `since` it began at zero."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        factors = factorise(value - since[name] if name in since else value, energy)
        found |= {name: value} if factors is None else named(name, factors)
    return found


def named(name: str, factors: Factors) -> dict[str, Tensor]:
    """Factors under the names that they travel by."""
    return {f"{name}.{factor}": value for factor, value in factors._asdict().items()}


def unpacked(message: Message, like: Tensors, since: Tensors) -> dict[str, Tensor]:
    """What `packed` was given, as far as its factors tell, on the CPU."""
    found: dict[str, Tensor] = {}
    for name, value in like.items():
        if name in message:
            found[name] = message.tensor(name)
            continue
        if missing := [f"{name}.{factor}" for factor in Factors._fields if f"{name}.{factor}" not in message]:
            raise SchemaError(f"the message has neither '{name}' nor '{missing[0]}'.")
        matrix = Factors(*(message.tensor(f"{name}.{factor}") for factor in Factors._fields)).matrix()
        begun = since[name].cpu().double() if name in since else 0.0
        found[name] = (begun + matrix.reshape(value.shape)).to(value.dtype)
    return found


class Shelf(nn.Module):
    """The factors that were sent last, in room for the most there can be, so that they can be saved and sent again."""

    ranks: Tensor

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._names = list(tensors)
        self.register_buffer("ranks", torch.zeros(len(tensors), dtype=torch.int64))  # 0: it went whole
        for name, field in fields(tensors).items():
            if any(isinstance(size, Dim) for size in field.shape):
                room = [size.most if isinstance(size, Dim) else size for size in field.shape]
                self.register_buffer(_slot(name), torch.zeros(room, dtype=field.dtype))

    def put(self, sent: Tensors) -> None:
        """Keep what `packed` gave."""
        for at, name in enumerate(self._names):
            self.ranks[at] = 0 if name in sent else len(sent[f"{name}.s"])
            for factor in Factors._fields if name not in sent else ():
                value = sent[f"{name}.{factor}"]
                self.get_buffer(_slot(f"{name}.{factor}"))[tuple(map(slice, value.shape))] = value

    def get(self, whole: Tensors) -> dict[str, Tensor]:
        """The same again, given what went whole."""
        found: dict[str, Tensor] = {}
        for name, r in zip(self._names, self.ranks.tolist(), strict=True):
            if not r:
                found[name] = whole[name]
                continue
            u, s, v = (self.get_buffer(_slot(f"{name}.{factor}")) for factor in Factors._fields)
            found |= named(name, Factors(u[:, :r], s[:r], v[:r]))
        return found


def _slot(name: str) -> str:
    return name.replace(".", "/")  # names of buffers have no dots

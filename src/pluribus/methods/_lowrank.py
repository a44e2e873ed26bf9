"""Matrices sent as factors of a truncated singular value decomposition, if the factors are smaller.

The kernel of a convolution is a matrix with one row per output channel. Vectors, integers and matrices whose factors
are not smaller are sent whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pluribus.errors import SchemaError
from pluribus.message import Dim, Field, Message, move_together

Tensors = Mapping[str, Tensor]
MOST_BY_GRAM = 1 - 1e-9  # above this share, the rounding of a Gram matrix could decide the rank


class Factors(NamedTuple):
    """U (m, r), sigma (r) and V^T (r, n) of a matrix."""

    u: Tensor
    s: Tensor
    v: Tensor

    def matrix(self) -> Tensor:
        """U diag(sigma) V^T in double precision, so that clients and server round to the same numbers."""
        u, s, v = (factor.double() for factor in self)
        return (u * s) @ v


def most_rank(shape: tuple[int, ...]) -> int:
    """The largest r with r (m + n + 1) < m n; 0 if there is none."""
    if len(shape) < 2 or not math.prod(shape):
        return 0
    m, n = shape[0], math.prod(shape[1:])
    return (m * n - 1) // (m + n + 1)


def rank(sigma: Tensor, energy: float) -> int:
    """The smallest r >= 1 such that the first r singular values hold this share of the sum of squares."""
    held = sigma.double().square().cumsum(0)
    return int((held < energy * held[-1]).sum()) + 1


def factorize(value: Tensor, energy: float) -> Factors | None:
    """The factors of least rank that hold this share of the squared norm. None: the tensor itself is not larger.

    Computed on the CPU in double precision, because the rank must not depend on rounding.
    """
    most = most_rank(tuple(value.shape)) if value.is_floating_point() else 0
    matrix = value.detach().cpu().double().flatten(1) if most else value
    if not most or not bool(matrix.isfinite().all()):  # the message refuses NaN and infinity
        return None
    u, s, v = truncate(matrix, energy)
    return Factors(*(factor.to(value.dtype) for factor in (u, s, v))) if len(s) <= most else None


def truncate(matrix: Tensor, energy: float) -> Factors:
    """The factors of least rank that hold this share of the squared norm of a matrix in double precision."""
    if energy > MOST_BY_GRAM:
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        r = rank(s, energy)
        return Factors(u[:, :r], s[:r], v[:r])
    if matrix.shape[0] > matrix.shape[1]:
        v, s, u = truncate(matrix.T, energy)
        return Factors(u.T, s, v.T)
    # M M^T has few rows: its eigenvectors U and eigenvalues sigma^2 take a quarter of the time of an SVD of M
    squares, vectors = torch.linalg.eigh(matrix @ matrix.T)  # in ascending order
    s = squares.clamp(min=0).sqrt().flip(0)  # rounding may make a square negative
    r = rank(s, energy)
    u, s = vectors.flip(1)[:, :r], s[:r]
    return Factors(u, s, u.T @ matrix / s.where(s > 0, 1.0)[:, None])  # sigma is 0 in a matrix of zeros alone


def fields(tensors: Tensors) -> dict[str, Field]:
    """The schema of what `packed` returns for these tensors."""
    found: dict[str, Field] = {}
    for name, value in tensors.items():
        shape, most = tuple(value.shape), most_rank(tuple(value.shape)) if value.is_floating_point() else 0
        found[name] = Field(shape, value.dtype, kept=False, optional=most > 0, source="weights")
        if most:
            r, m, n = Dim(f"{name} rank", most), shape[0], math.prod(shape[1:])
            for factor, size in {"u": (m, r), "s": (r,), "v": (r, n)}.items():
                found[f"{name}.{factor}"] = Field(size, value.dtype, kept=False, optional=True, source="weights")
    return found


def packed(tensors: Tensors, energy: float, since: Tensors) -> dict[str, Tensor]:
    """Compress tensors: each as the factors of its change from `since` (default: zero), or whole."""
    changes = {name: value - since[name] if name in since else value for name, value in tensors.items()}
    found: dict[str, Tensor] = {}
    for name, change in move_together(changes, "cpu").items():
        factors = factorize(change, energy)
        found |= {name: tensors[name]} if factors is None else named(name, factors)
    return found


def named(name: str, factors: Factors) -> dict[str, Tensor]:
    """Name factors as they are named in messages."""
    return {f"{name}.{factor}": value for factor, value in factors._asdict().items()}


def unpacked(message: Message, like: Tensors, since: Tensors) -> dict[str, Tensor]:
    """Restore, on the CPU, the tensors that `packed` compressed, up to truncation."""
    since = move_together({name: value for name, value in since.items() if name not in message}, "cpu")
    found: dict[str, Tensor] = {}
    for name, value in like.items():
        if name in message:
            found[name] = message.tensor(name)
            continue
        if missing := [f"{name}.{factor}" for factor in Factors._fields if f"{name}.{factor}" not in message]:
            raise SchemaError(f"the message has neither '{name}' nor '{missing[0]}'.")
        matrix = Factors(*(message.tensor(f"{name}.{factor}") for factor in Factors._fields)).matrix()
        start = since[name].double() if name in since else 0.0
        found[name] = (start + matrix.reshape(value.shape)).to(value.dtype)
    return found


class Shelf(nn.Module):
    """The factors that were sent last, in buffers of the largest rank, so that they can be saved and sent again."""

    ranks: Tensor

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._names = list(tensors)
        self.register_buffer("ranks", torch.zeros(len(tensors), dtype=torch.int64))  # 0: sent whole
        for name, field in fields(tensors).items():
            if any(isinstance(size, Dim) for size in field.shape):
                room = [size.most if isinstance(size, Dim) else size for size in field.shape]
                self.register_buffer(_buffer_name(name), torch.zeros(room, dtype=field.dtype))

    def put(self, sent: Tensors) -> None:
        """Keep the tensors that `packed` returned."""
        for at, name in enumerate(self._names):
            self.ranks[at] = 0 if name in sent else len(sent[f"{name}.s"])
            for factor in Factors._fields if name not in sent else ():
                value = sent[f"{name}.{factor}"]
                self.get_buffer(_buffer_name(f"{name}.{factor}"))[tuple(map(slice, value.shape))] = value

    def get(self, whole: Tensors) -> dict[str, Tensor]:
        """The kept factors, and the tensors that were sent whole, taken from `whole`."""
        found: dict[str, Tensor] = {}
        for name, r in zip(self._names, self.ranks.tolist(), strict=True):
            if not r:
                found[name] = whole[name]
                continue
            u, s, v = (self.get_buffer(_buffer_name(f"{name}.{factor}")) for factor in Factors._fields)
            found |= named(name, Factors(u[:, :r], s[:r], v[:r]))
        return found


def _buffer_name(name: str) -> str:
    return name.replace(".", "/")  # torch allows no dots in buffer names

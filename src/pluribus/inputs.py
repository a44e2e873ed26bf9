"""What one row of a data set is to a model: its kind, its shape, and the numbers that it may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Kind = Literal["image", "signal", "tokens", "table", "tensor"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PADDING = 0  # the id after the last token of a row
UNKNOWN = 1  # the id of a token that is not in the vocabulary
MOST = 2**31 - 1  # numbers of a row, and ids of tokens
DIMENSIONS = {"image": 3, "signal": 2, "tokens": 1, "table": 1}
MANY = {"image": "images", "signal": "signals", "tokens": "tokens", "table": "tables", "tensor": "tensors"}


@dataclass(frozen=True)
class Input:
    """One row, as a model gets it. All models of a federation get rows of one form.

    An image is (channels, height, width), a signal (channels, length), a table (columns,), and a row of tokens
    (length,): numbers below `vocabulary`, where 0 is the padding after the last token. `categories` are the numbers of
    values in the last columns of a table: each value is a number from 0.
    """

    kind: Kind
    shape: tuple[int, ...]
    vocabulary: int = 0
    categories: tuple[int, ...] = ()
    whole: bool = False
    """Whether rows of the kind `tensor` hold whole numbers (int64) instead of float32. Tokens always do."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64 if self.kind == "tokens" or self.whole else torch.float32

    def zeros(self, rows: int, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """Rows of zeros. `dtype` replaces float32. Of tokens, rows of the id 1: a row has at least one token."""
        if self.dtype != torch.int64:
            return torch.zeros(rows, *self.shape, dtype=dtype or self.dtype, device=device)
        filled = UNKNOWN if self.kind == "tokens" else 0
        return torch.full((rows, *self.shape), filled, dtype=torch.int64, device=device)

    def __str__(self) -> str:
        """The rows in words.

        >>> print(Input("image", (3, 32, 32))), print(Input("tokens", (64,), vocabulary=8192))
        3x32x32 images
        rows of 64 tokens
        (None, None)
        """
        size = "x".join(map(str, self.shape))
        if self.kind == "tokens":
            return f"rows of {size} tokens"
        return f"rows of {size} columns" if self.kind == "table" else f"{size} {MANY[self.kind]}"

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Input:
        """Read facts from a file or from another machine. Facts that describe no input raise a ValueError."""
        if not isinstance(facts, Mapping):
            raise ValueError(f"{facts!r:.80} is no input")
        kind, whole, vocabulary = facts.get("kind"), facts.get("whole", False), facts.get("vocabulary", 0)
        shape, categories = _sizes(facts.get("shape")), _sizes(facts.get("categories", ()))
        if kind not in KINDS or len(shape) != DIMENSIONS.get(kind, len(shape) or -1):
            raise ValueError(f"{kind!r:.80} of shape {shape} is no input")
        if math.prod(shape) > MOST or not isinstance(whole, bool) or (whole and kind != "tensor"):
            raise ValueError(f"{kind} of shape {shape} are no input, or too large")
        if len(categories) > (shape[0] if kind == "table" else 0):
            raise ValueError(f"{len(categories)} categories do not fit {kind} of shape {shape}")
        if type(vocabulary) is not int or not (UNKNOWN < vocabulary <= MOST if kind == "tokens" else vocabulary == 0):
            raise ValueError(f"a vocabulary of {vocabulary!r:.80} does not fit {kind}")
        return cls(kind, shape, vocabulary, categories, whole)


def _sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{values!r:.80} are no sizes of an input")
    for number in values:
        if type(number) is not int or not 1 <= number <= MOST:
            raise ValueError(f"{number!r:.80} is not the size of an input")
    return tuple(values)


def as_input(value: Input | tuple[int, ...]) -> Input:
    """An input, or the one of a shape alone: three numbers are an image, others a tensor."""
    if isinstance(value, Input):
        return value
    return Input("image" if len(value) == 3 else "tensor", tuple(value))

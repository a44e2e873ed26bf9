"""Models that this machine cannot build: a real site builds them with code of its own, and says what they give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

from torch import nn

from pluribus.errors import MismatchError
from pluribus.models.two_part import TwoPartModel


class Unseen(NamedTuple):
    """What is known about such a model: the width of its features, and the shapes of its head."""

    width: int
    head: tuple[tuple[int, ...], ...]

    def stand_in(self, name: str, classes: int) -> TwoPartModel:
        """A model with a head of these shapes, if it is linear. Looking into any other part is an error."""
        weight, bias = (classes, self.width), (classes,)
        if self.head not in ((weight,), (weight, bias)):
            return TwoPartModel(_Hidden(name), _Hidden(name), self.width)
        return TwoPartModel(_Hidden(name), nn.Linear(self.width, classes, bias=bias in self.head), self.width)


class _Hidden(nn.Module):
    """A part of a model that this machine does not know. It may be carried around, but not looked at."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.of = name

    def forward(self, *args: Any) -> NoReturn:
        self._refuse()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self._refuse()  # parameters and buffers are found through it too

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise MismatchError(
            f"the method needs the architecture of model '{self.of}', which only its site can build. Use a method that "
            f"needs no more than features and linear heads, such as fedgh, fedproto or fd, or give that site a model "
            f"of pluribus list models."
        )

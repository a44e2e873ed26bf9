"""The rows that a model is typically built for, and its size on them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from pluribus.errors import PluribusError
from pluribus.inputs import Input, Kind
from pluribus.models.groups import GROUPS
from pluribus.models.zoo import build, entries

CLASSES = 10
TYPICAL: dict[Kind, Input] = {
    "image": Input("image", (3, 32, 32)),
    "signal": Input("signal", (9, 128)),
    "tokens": Input("tokens", (64,), vocabulary=8192),
    "table": Input("table", (30,)),
    "tensor": Input("tensor", (30,)),
}
# Models for other images.
IMAGES: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(GROUPS["small"].models, (1, 8, 8)),
    **dict.fromkeys(GROUPS["tiny"].models, (1, 16, 16)),
    "lenet": (1, 28, 28),
}
PHOTOS = ("pluribus.models.vision", "pluribus.models.vits")  # modules with models for photos of 224 x 224 pixels


class Size(NamedTuple):
    """The feature width of a model, and its number of parameters for 10 classes."""

    width: int
    parameters: int


def typical_input(name: str) -> Input:
    """The rows that a registered model is typically built for: of the first kind that it takes."""
    entry = entries()[name]
    if name in IMAGES:
        return Input("image", IMAGES[name])
    if getattr(entry.builder, "__module__", "") in PHOTOS:
        return Input("image", (3, 224, 224))
    return TYPICAL[entry.takes[0]]


def size_of(name: str) -> Size | None:
    """The size of a registered model on its typical input. None: it cannot be built for that."""
    return _size(name, entries()[name].builder)


@cache
def _size(name: str, builder: object) -> Size | None:
    """The size, computed once for each builder, because deep networks take a moment."""
    try:
        with torch.device("meta"):
            model = build(name, shape=typical_input(name), classes=CLASSES)
    except PluribusError:  # a user's model for other rows
        return None
    return Size(model.width, sum(parameter.numel() for parameter in model.parameters()))

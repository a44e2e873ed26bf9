"""The registry of architectures, and `build`, which builds a `TwoPartModel` from a name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import nn

from pluribus.errors import MismatchError, UnknownNameError, UserCodeError, unknown
from pluribus.internal.blame import at, first_line, own_line
from pluribus.internal.lookup import import_dotted
from pluribus.models.pretrained import Origin, fill_weights
from pluribus.models.probe import Shape, output_width, shape_text
from pluribus.models.two_part import PROJECTORS, TwoPartModel, projection

Builder = Callable[[Shape], nn.Module]
HeadKind = Literal["linear", "mlp"]
LIST_COMMAND = "pluribus list models"
MLP_HEAD_HIDDEN = 768

_B = TypeVar("_B", bound=Builder)


@dataclass(frozen=True)
class ModelEntry:
    """One architecture. `builder` returns its backbone, which maps each image to one flat feature vector.

    `origin` is the source of its pretrained weights, if there is one. A builder that loads weights itself has an
    attribute `pretrained = True`.
    """

    name: str
    about: str
    builder: Builder
    head: HeadKind = "linear"
    origin: Origin | None = None

    @property
    def loads_own(self) -> bool:
        return getattr(self.builder, "pretrained", False) is True


_entries: dict[str, ModelEntry] = {}
_native_widths: dict[tuple[str, Shape], int] = {}


def register_model(
    name: str, about: str, *, head: HeadKind = "linear", origin: Origin | None = None
) -> Callable[[_B], _B]:
    """Register a builder of backbones, with one line about it for `pluribus list models`."""

    def register(builder: _B) -> _B:
        if "." in name or "," in name:
            raise UserCodeError(f"model name '{name}' must not contain a dot (own builders) or a comma (lists).")
        if name in _entries:
            raise UserCodeError(f"model '{name}' is already registered. Choose another name.")
        _entries[name] = ModelEntry(name, about, builder, head, origin)
        return builder

    return register


def entries() -> dict[str, ModelEntry]:
    """All registered architectures by name, in the order of registration."""
    return dict(_entries)


def has_weights(name: str, weights: str | None = None) -> bool:
    """Whether a model starts from pretrained weights. `weights` is their source, as in `build`."""
    entry = _find(name)
    comes_with = entry.origin is not None and entry.origin.source == "package"
    return weights is not None or comes_with or entry.loads_own  # `build` refuses a source that does not have them


def build(
    name: str,
    *,
    shape: Shape,
    classes: int,
    width: int | None = None,
    projector: str = "pool",
    weights: str | None = None,
) -> TwoPartModel:
    """Build the model `name` for images of `shape` (channels, height, width).

    `name` is a registered model or the dotted path of your own builder, `package.module.function`, which takes the
    shape and returns a backbone or a complete `TwoPartModel`. `width` is the common feature width K of all clients, and
    `projector` ("pool", "linear") is the way to it. None, or the projector "none", keeps the native width. `weights` is
    the source of the backbone's pretrained weights: timm, torchvision, or a folder with a file `name`.safetensors.
    Models that come with weights do not need it. All other weights are drawn from torch's global generator: seed it
    before the call. Under `torch.device("meta")` the model holds no numbers.
    """
    if projector not in PROJECTORS:
        raise UnknownNameError(f"unknown projector '{projector}'. Use one of {', '.join(PROJECTORS)}.")
    common = None if projector == "none" else width
    entry = _find(name)
    with at(f"model {name}"):
        try:
            backbone = entry.builder(shape)
            if isinstance(backbone, TwoPartModel):
                _check(backbone, name, shape, classes, common)
                fill_weights(backbone, name, entry.origin, entry.loads_own, weights, shape)
                return backbone
            backbone = fill_weights(backbone, name, entry.origin, entry.loads_own, weights, shape)
            native = _native_width(backbone, name, shape)
        except RuntimeError as error:
            own = own_line(error)
            why = first_line(error) + (f" ({own})" if own else "")
            raise MismatchError(f"model '{name}' cannot take {shape_text(shape)} images: {why}.") from error
        width = common or native
        features = nn.Sequential(OrderedDict(backbone=backbone, projector=projection(projector, native, width)))
        return TwoPartModel(features, _head(entry.head, width, classes), width)


def _find(name: str) -> ModelEntry:
    """The entry of a registered name, or one made for a dotted path."""
    if "." in name:
        builder = import_dotted(name, "model")
        if not callable(builder):
            raise UserCodeError(
                f"model '{name}' is not a function. Name one that takes an image shape and returns a backbone."
            )
        return ModelEntry(name, "your own builder", builder)
    if name not in _entries:
        raise unknown("model", name, _entries, LIST_COMMAND)
    return _entries[name]


def _native_width(backbone: nn.Module, name: str, shape: Shape) -> int:
    """Measure the width once per name and shape, because a deep network takes up to half a second."""
    if (name, shape) not in _native_widths:
        _native_widths[name, shape] = output_width(backbone, shape)
    return _native_widths[name, shape]


def _check(model: TwoPartModel, name: str, shape: Shape, classes: int, common: int | None) -> None:
    """Check that a user's complete model is what it declares."""
    missing = [part for part in ("features", "head", "width") if not hasattr(model, part)]
    if missing:
        raise UserCodeError(
            f"model '{name}' is a TwoPartModel without {missing[0]}. Set it, or call TwoPartModel.__init__."
        )
    if (given := output_width(model.features, shape)) != model.width:
        raise UserCodeError(f"model '{name}' declares width {model.width}, but its features have width {given}.")
    if (given := output_width(model, shape)) != classes:
        raise MismatchError(f"model '{name}' returns {given} logits, but the task has {classes} classes.")
    if common not in (None, model.width):
        raise MismatchError(
            f"model '{name}' is a complete TwoPartModel of width {model.width}, but the common width is {common}. "
            f"Use --width {model.width}, or let its builder return a backbone, which is then projected."
        )


def _head(kind: HeadKind, width: int, classes: int) -> nn.Module:
    if kind == "linear":
        return nn.Linear(width, classes)
    return nn.Sequential(nn.Linear(width, MLP_HEAD_HIDDEN), nn.Tanh(), nn.Linear(MLP_HEAD_HIDDEN, classes))

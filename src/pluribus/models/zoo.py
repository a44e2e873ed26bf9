"""The registry of architectures, and `build`, which builds a `TwoPartModel` from a name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from pluribus.errors import MismatchError, UnknownNameError, UserCodeError, unknown
from pluribus.inputs import KINDS, MANY, Input, Kind, as_input
from pluribus.internal.blame import at, first_line, own_line
from pluribus.internal.lookup import import_dotted, is_given, refuse_given
from pluribus.internal.registry import check_free, is_built_in
from pluribus.models.capacity import Capacity, architecture_of, split_name
from pluribus.models.depth import shorten
from pluribus.models.hf import HF, hf_backbone
from pluribus.models.meta import without_numbers
from pluribus.models.own import Model, OwnModel, cut, find_cut, layout, make, may_classify
from pluribus.models.pretrained import Origin, fill_weights
from pluribus.models.probe import Shape, output_width
from pluribus.models.timm import TIMM, timm_backbone
from pluribus.models.two_part import PROJECTORS, TwoPartModel, projection
from pluribus.models.width import narrow

Builder = Callable[..., nn.Module]
HeadKind = Literal["linear", "mlp"]
LIST_COMMAND = "pluribus list models"
MLP_HEAD_HIDDEN = 768
# The group of models for each kind of rows, and how a user finds others.
GROUP_OF: dict[Kind, str] = {"image": "small", "signal": "sensor5", "tokens": "text6", "table": "table4"}
GROUP_OF["tensor"] = "table4"
LOOK = {kind: f"Use --models {group}, or one of {LIST_COMMAND} --takes {kind}." for kind, group in GROUP_OF.items()}

_B = TypeVar("_B", bound=Builder)


@dataclass(frozen=True)
class ModelEntry:
    """One architecture. `builder` returns its backbone, which maps each row to one flat feature vector.

    `origin` is the source of its pretrained weights, if there is one. A builder that loads weights itself has an
    attribute `pretrained = True`.
    """

    name: str
    about: str
    builder: Callable[..., Any] | nn.Module
    head: HeadKind = "linear"
    origin: Origin | None = None
    own: bool = False
    """Whether it is not registered, but given by its path or as an object."""
    takes: tuple[Kind, ...] = KINDS
    """The kinds of rows that it takes."""

    @property
    def loads_own(self) -> bool:
        return isinstance(self.builder, nn.Module) or getattr(self.builder, "pretrained", False) is True


_entries: dict[str, ModelEntry] = {}
_native_widths: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()  # by builder


def register_model(
    name: str,
    about: str,
    *,
    takes: Kind | tuple[Kind, ...] = "image",
    head: HeadKind = "linear",
    origin: Origin | None = None,
) -> Callable[[_B], _B]:
    """Register a builder of backbones, with one line about it for `pluribus list models`.

    `takes` are the kinds of rows that it takes. The builder gets what it asks for, see `own.py`.

    A builder that is defined again, as in a cell of a notebook, replaces itself.
    """

    def register(builder: _B) -> _B:
        if any(sign in name for sign in ".,@"):
            raise UserCodeError(
                f"model name '{name}' must not contain a dot (own builders), a comma (lists) or an @ (capacities)."
            )
        known = _entries.get(name)
        check_free("model", name, known and known.builder, builder)
        kinds = (takes,) if isinstance(takes, str) else takes
        _entries[name] = ModelEntry(name, about, builder, head, origin, takes=kinds)
        return builder

    return register


def entries() -> dict[str, ModelEntry]:
    """All registered architectures by name, in the order of registration."""
    return dict(_entries)


def comes_with_library(model: str) -> bool:
    """Whether a name is that of a model of this library, not of a user or of another library."""
    entry = _entries.get(architecture_of(model))
    return entry is not None and is_built_in(entry.builder)


def find_own_builders(names: Iterable[str]) -> dict[str, Any]:
    """The builders that are the user's own code, of those models that have a registered name or a dotted path."""
    known = [
        name
        for name in dict.fromkeys(map(architecture_of, names))
        if not (is_given(name) or name.startswith((TIMM, HF)))
    ]
    builders = {name: _find(name).builder for name in known}
    return {name: builder for name, builder in builders.items() if not is_built_in(builder)}


def has_weights(model: Model, weights: str | None = None) -> bool:
    """Whether a model starts from pretrained weights. `weights` is their source, as in `build`."""
    entry = _find(model)
    comes_with = entry.origin is not None and entry.origin.source == "package"
    return weights is not None or comes_with or entry.loads_own  # `build` refuses a source that does not have them


def build(
    model: Model,
    *,
    shape: Input | Shape,
    classes: int,
    width: int | None = None,
    projector: str = "pool",
    weights: str | None = None,
    split: str | None = None,
    capacity: Capacity | None = None,
) -> TwoPartModel:
    """Build a model for rows of a form: an `Input`, or the shape of an image (channels, height, width).

    `classes` is the number of outputs. `capacity` says how much of the model is built; a name may contain it
    (`cnn4@0.5`).
    `model` is a registered name, a model of timm (`timm:NAME`), a text encoder of Hugging Face (`hf:NAME`), the dotted
    path of your own builder, `package.module.function`, or an object (see `own.py`). A builder returns a backbone,
    a complete `TwoPartModel`, or a classifier, which is split at the layer `split`. `width` is the common feature
    width K of all clients, and `projector` ("pool", "linear") is the way to it. None, or the projector "none",
    keeps the native width. `weights` is the source of the backbone's pretrained weights: timm, torchvision, hf, or
    a folder with a file `name`.safetensors. Models that come with weights do not need it. All other weights are
    drawn from torch's global generator: seed it before the call. Under `torch.device("meta")` the model holds no
    numbers.
    """
    if projector not in PROJECTORS:
        raise UnknownNameError(f"unknown projector '{projector}'. Use one of {', '.join(PROJECTORS)}.")
    common, shape = None if projector == "none" else width, as_input(shape)
    if isinstance(model, str) and capacity is None:
        model, capacity = split_name(model)
    entry = _find(model)
    name = entry.name
    if capacity is not None and capacity.kind != "rank":
        _check_cut(name, has_weights(model, weights))
    if shape.kind not in entry.takes:
        *some, last = (MANY[kind] for kind in entry.takes)
        kinds = f"{', '.join(some)} and {last}" if some else last
        raise MismatchError(f"model '{name}' takes {kinds}, but the data are {MANY[shape.kind]}. {LOOK[shape.kind]}")
    with at(f"model {name}"):
        try:
            made = make(entry.builder, name, shape, classes)
            net = made.net
            if isinstance(net, TwoPartModel):
                if capacity is not None and capacity.kind != "rank":
                    raise MismatchError(f"model '{name}' is complete: only a backbone can be cut to a capacity.")
                _check(net, name, shape, classes, common)
                fill_weights(net, name, entry.origin, entry.loads_own, weights, shape)
                return net
            is_open = entry.own or made.may_classify  # a registered builder of the shape alone makes backbones
            path = find_cut(entry.builder, made, name, shape, classes, split).path if is_open else None
            net, head = (net, None) if path is None else cut(net, path)
            if capacity is not None and capacity.kind != "rank":
                net, head = cut_to(net, capacity, name, shape), None
            backbone = fill_weights(net, name, entry.origin, entry.loads_own, weights, shape)
            native = _native_width(backbone, entry.builder, shape, (path, capacity))
        except RuntimeError as error:
            own = own_line(error)
            why = first_line(error) + (f" ({own})" if own else "")
            raise MismatchError(f"model '{name}' cannot take {shape}: {why}.") from error
        width = common or native
        if head is not None and width == native:
            return TwoPartModel(backbone, head, width)
        features = nn.Sequential(OrderedDict(backbone=backbone, projector=projection(projector, native, width)))
        return TwoPartModel(features, _head(entry.head, width, classes), width)


def cut_to(net: nn.Module, capacity: Capacity, name: str, shape: Input) -> nn.Module:
    """The part of a backbone that a capacity leaves."""
    if capacity.kind == "depth":
        return shorten(net, int(capacity.value), name, shape)
    return narrow(net, capacity.value, name, shape)


def _check_cut(name: str, pretrained: bool) -> None:
    if pretrained:
        raise MismatchError(
            f"model '{name}' has pretrained weights, which do not fit a part of it. Use another model, or leave "
            f"out the capacity."
        )


def note_on(model: Model, shape: Input, classes: int, width: int | None, split: str | None) -> str:
    """A sentence about how a user's own model becomes a model in two parts. Empty if there is nothing to say."""
    entry = _find(model)
    if not (entry.own or may_classify(entry.builder, entry.name, shape, classes)):
        return ""
    with without_numbers():
        made = make(entry.builder, entry.name, shape, classes)
        if isinstance(made.net, TwoPartModel):
            return ""
        found = find_cut(entry.builder, made, entry.name, shape, classes, split)
        if found.path is None or width is None:
            return found.note
        net, _ = cut(made.net, found.path)
        native = _native_width(net, entry.builder, shape, (found.path, None))
    if native == width:
        return found.note
    replaced = f"Its head takes {native} features, but the common width is {width}: it gets a new head."
    return f"{found.note} {replaced}".strip()


def _find(model: Model) -> ModelEntry:
    """The entry of a registered name, or one made for a dotted path, a model of another library or an object."""
    if isinstance(model, OwnModel):
        return ModelEntry(model.name, "given in Python", model.source, own=True)
    model = architecture_of(model)
    refuse_given("model", model)
    if model.startswith(TIMM):
        return _timm_entry(model)
    if model.startswith(HF):
        return _hf_entry(model)
    if is_code(model):
        builder = import_dotted(model, "model")
        if not callable(builder):
            raise UserCodeError(f"model '{model}' is not a function that returns a module.")
        return ModelEntry(model, "your own builder", builder, own=True)
    if model not in _entries:
        raise unknown("model", model, _entries, LIST_COMMAND)
    return _entries[model]


def is_code(name: str) -> bool:
    """Whether the name of a model is the dotted path of a builder."""
    name = architecture_of(name)
    return "." in name and not is_given(name) and not name.startswith((TIMM, HF))


@cache
def _timm_entry(name: str) -> ModelEntry:
    backbone = timm_backbone(name.removeprefix(TIMM))
    return ModelEntry(name, "a model of timm", backbone, origin=backbone.origin, takes=("image",))


@cache
def _hf_entry(name: str) -> ModelEntry:
    backbone = hf_backbone(name.removeprefix(HF))
    return ModelEntry(name, "a model of Hugging Face", backbone, origin=Origin("hf", backbone.name), takes=("tokens",))


def _native_width(backbone: nn.Module, builder: Any, shape: Input, parts: tuple[str | None, Capacity | None]) -> int:
    """Measure the width once per builder, shape, cut and capacity: a deep network takes up to half a second."""
    known, key = _native_widths.setdefault(builder, {}), (shape, parts, layout(builder))
    if key not in known:
        known[key] = output_width(backbone, shape)
    return known[key]


def _check(model: TwoPartModel, name: str, shape: Input, classes: int, common: int | None) -> None:
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

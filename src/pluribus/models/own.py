"""A user's own models: builders and modules from Python, and where a complete classifier is cut into two parts.

A builder gets what it asks for: the number of classes as `classes` or `num_classes`, the number of channels as
`in_channels`, the size of the vocabulary of tokens as `vocabulary`, the numbers of values of a table's categories as
`categories`, and the shape of a row as its first other argument. It returns a `TwoPartModel`, a classifier or a
backbone. One that asks for the shape and not for the classes returns a backbone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pluribus.errors import FormatError, MismatchError, MissingSettingError, UserCodeError
from pluribus.inputs import Input
from pluribus.internal.lookup import dotted_path, given_name, object_name
from pluribus.models.probe import run_with_zeros

NO_HEAD = "none"  # value of the setting `split`: modules are backbones
CLASSES = ("classes", "num_classes", "n_classes")
CHANNELS = ("in_channels", "in_chans", "channels")


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A model that is given as an object: a function or class that builds it, or a module, which is copied."""

    name: str
    source: Callable[..., Any] | nn.Module = field(repr=False)


class Made(NamedTuple):
    """What a builder returned, and whether that may be a classifier. A builder of the shape alone makes backbones."""

    net: nn.Module
    may_classify: bool


Model = str | OwnModel
Models = str | tuple[Model, ...] | Mapping[int, Model]


# Take -----------------------------------------------------------------------------------------------------------------


def take_models(value: Any) -> Models:
    """The value of the setting `models`: names stay, objects get a name that is unique in the experiment."""
    known: dict[str, OwnModel] = {}
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {_client(client): _take(one, known) for client, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        if not value:
            raise MissingSettingError("the list of models is empty. pluribus list models shows all models.")
        return tuple(_take(one, known) for one in value)
    return (_take(value, known),)


def _client(client: Any) -> int:
    if not isinstance(client, int):
        raise FormatError(f"--models maps client numbers to models, but {client!r} is not a number.")
    return client


def _take(value: Any, known: dict[str, OwnModel]) -> Model:
    if isinstance(value, str):
        return value
    if isinstance(value, OwnModel):
        return known.setdefault(value.name, value)
    if not callable(value):
        raise FormatError(f"--models must be names, functions or modules, not {value!r:.80}.")
    if not isinstance(value, nn.Module) and (path := dotted_path(value)):
        return path
    for one in known.values():
        if one.source is value:
            return one
    name, number = given_name(object_name(value)), 2
    while name in known:
        name, number = f"{given_name(object_name(value))}-{number}", number + 1
    known[name] = OwnModel(name, value)
    return known[name]


def name_model(model: Model) -> str:
    """The name of a model in files and tables."""
    return model if isinstance(model, str) else model.name


def own_models(models: Models) -> dict[str, OwnModel]:
    """The objects among the models, by name."""
    if isinstance(models, str):
        return {}
    every = models.values() if isinstance(models, Mapping) else models
    return {one.name: one for one in every if isinstance(one, OwnModel)}


# Build ----------------------------------------------------------------------------------------------------------------


def make(source: Callable[..., Any] | nn.Module, name: str, shape: Input, classes: int) -> Made:
    """Call a builder, or copy a module. Under `torch.device("meta")` the copy has no numbers."""
    if isinstance(source, nn.Module):
        net = copy.deepcopy(source)
        return Made(net.to("meta") if torch.get_default_device().type == "meta" else net, True)
    positional, named = _arguments(source, name, shape, classes)
    net = source(*positional, **named)
    if not isinstance(net, nn.Module):
        each = " To choose a model for each client, give a list." if isinstance(net, str) else ""
        raise UserCodeError(f"model '{name}' must return a torch module, but returned {type(net).__name__}.{each}")
    return Made(net, _may_classify(positional, named))


def may_classify(source: Callable[..., Any] | nn.Module, name: str, shape: Input, classes: int) -> bool:
    """Whether a builder or a module may be a classifier. Nothing is built to find out."""
    return isinstance(source, nn.Module) or _may_classify(*_arguments(source, name, shape, classes))


def _may_classify(positional: Sequence[Any], named: Mapping[str, Any]) -> bool:
    return not (positional or "shape" in named) or any(key in named for key in CLASSES)


def _arguments(builder: Callable[..., Any], name: str, shape: Input, classes: int) -> tuple[list[Any], dict[str, Any]]:
    """What a builder asks for. Arguments after `*` or with a default are asked for by their name alone."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):  # some functions in C have no signature
        return [shape.shape], {}
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for one in parameters:
        if one.kind is one.VAR_KEYWORD and "num_classes" not in named:
            named["num_classes"] = classes  # torchvision's and timm's functions take it
        elif one.name in CLASSES:
            named[one.name] = classes
        elif one.name in CHANNELS:
            named[one.name] = shape.shape[0]
        elif one.name in ("vocabulary", "categories"):
            named[one.name] = getattr(shape, one.name)
        elif one.name == "shape" and one.kind is not one.POSITIONAL_ONLY:
            named["shape"] = shape.shape
        elif one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            if positional or named:
                raise UserCodeError(
                    f"model '{name}' asks for '{one.name}'. A builder may ask for shape, classes, in_channels, "
                    f"vocabulary and categories: give the other arguments a default."
                )
            positional.append(shape.shape)
    return positional, named


# Cut ------------------------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """Where the head of a classifier is: its path in the module. None: the module is a backbone."""

    path: str | None
    note: str = ""


def layout(source: Any) -> str:
    """What tells a module from itself after its user has changed a layer. Empty for a builder."""
    return repr(source) if isinstance(source, nn.Module) else ""


class _Call(NamedTuple):
    path: str
    inputs: Any
    output: Any


_cuts: WeakKeyDictionary[Any, dict[Any, Cut]] = WeakKeyDictionary()


def find_cut(source: Any, made: Made, name: str, shape: Input, classes: int, split: str | None) -> Cut:
    """Find the head of a user's module. It is found once per builder or module, because that takes a forward pass."""
    known = _cuts.setdefault(source, {})
    key = shape, classes, split, layout(source)
    if key not in known:
        known[key] = _find_cut(made, name, shape, classes, split)
    return known[key]


def _find_cut(made: Made, name: str, shape: Input, classes: int, split: str | None) -> Cut:
    wanted = _named_heads(made.net, split)
    output, calls = _run(made.net, shape, wanted)
    if not isinstance(output, Tensor):
        part = "[0]" if isinstance(output, tuple | list) else "['logits']" if isinstance(output, Mapping) else ".logits"
        raise UserCodeError(
            f"model '{name}' returns a {type(output).__name__}, not a tensor. Wrap it in a module whose forward gives "
            f"the logits, such as `return self.net(x){part}`."
        )
    if output.dim() != 2:
        raise RuntimeError("it must return one flat vector for each row")
    width = output.shape[1]
    last = calls[-1] if calls and calls[-1].output is output else None
    if wanted:
        return _cut_at(last, wanted[0], name, width, classes)
    if split == NO_HEAD or last is None or not made.may_classify:
        doubtful = made.may_classify or (last is not None and width == classes)
        return Cut(None, _note_added(name, width) if doubtful else "")
    if width != classes:
        raise MismatchError(
            f"model '{name}' ends in a linear layer with {width} outputs, but the task has {classes} classes. Change "
            f"that layer, or use --split none if the outputs are features."
        )
    return Cut(last.path, f"{_shown(name)} is split at its last linear layer, '{last.path}', which is its head.")


def _named_heads(net: nn.Module, split: str | None) -> list[str]:
    """The first of the layers in `split` that the module has."""
    if split in (None, NO_HEAD):
        return []
    known = dict(net.named_modules())
    names = [word.strip() for word in str(split).split(",")]
    if not (found := [word for word in names if word in known]):
        shown = ", ".join(path for path in list(known)[-5:] if path)
        raise MismatchError(f"--split {split}: the module has no such layer. Its last layers are {shown}.")
    return found[:1]


def _cut_at(last: _Call | None, path: str, name: str, width: int, classes: int) -> Cut:
    if last is None:
        raise MismatchError(f"--split {path}: the output of model '{name}' does not come from this layer.")
    if width != classes:
        raise MismatchError(f"model '{name}' returns {width} numbers, but the task has {classes} classes.")
    if not (last.inputs and isinstance(last.inputs[0], Tensor) and last.inputs[0].dim() == 2):
        raise MismatchError(f"--split {path}: this layer of model '{name}' must take one flat vector for each row.")
    return Cut(path)


def _note_added(name: str, width: int) -> str:
    return f"{_shown(name)} returns {width} numbers, which are taken as features: a linear head is added."


def _shown(name: str) -> str:
    return f"model {name.removeprefix('given:')}"


def _run(net: nn.Module, shape: Input, only: Sequence[str]) -> tuple[Any, list[_Call]]:
    """The output of a module, and the calls of its linear layers, or of the layers in `only`."""
    calls: list[_Call] = []

    def record(path: str) -> Callable[..., None]:
        return lambda _, inputs, output: calls.append(_Call(path, inputs, output))

    chosen = {path: one for path, one in net.named_modules() if (path in only if only else isinstance(one, nn.Linear))}
    hooks = [one.register_forward_hook(record(path)) for path, one in chosen.items()]
    try:
        return run_with_zeros(net, shape), calls
    finally:
        for hook in hooks:
            hook.remove()


def cut(net: nn.Module, path: str) -> tuple[nn.Module, nn.Module]:
    """Take the head out of a classifier: what is left are the features."""
    if not path:
        return nn.Identity(), net
    head = net.get_submodule(path)
    net.set_submodule(path, nn.Identity())
    return net, head

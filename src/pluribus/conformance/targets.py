"""What a user asks to check: a method, a model or a data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from torch import nn
from torch.utils.data import Dataset as TorchDataset

from pluribus import models
from pluribus.data import Dataset
from pluribus.data import entries as data_sets
from pluribus.errors import FormatError, UnknownNameError, unknown
from pluribus.internal.lookup import import_dotted
from pluribus.method import Method, methods, name_of
from pluribus.models.capacity import architecture_of
from pluribus.models.hf import HF
from pluribus.models.timm import TIMM

Kind = Literal["method", "model", "data"]


class Target(NamedTuple):
    """What is checked: its kind, its name in the report, and the object or name itself."""

    kind: Kind
    name: str
    value: Any


def find_target(target: Any, kind: Kind | None = None) -> Target:
    """Find out what is to be checked. A name that several kinds have is a method, then a model, then a data set."""
    if kind is not None and kind not in get_args(Kind):
        raise UnknownNameError(f"unknown kind '{kind}': use method, model or data.")
    return Target(kind or _kind_of(target), _name(target), target)


def _kind_of(target: Any) -> Kind:
    if isinstance(target, str):
        return _kind_of_name(target)
    if isinstance(target, Method) or (isinstance(target, type) and issubclass(target, Method)):
        return "method"
    if isinstance(target, nn.Module) or (isinstance(target, type) and issubclass(target, nn.Module)):
        return "model"
    if isinstance(target, Dataset | TorchDataset | Path | tuple):
        return "data"
    if callable(target):
        return _kind_of_function(target)
    raise FormatError(
        f"cannot check a value of type {type(target).__name__}: give a method, a model or a data set, or set kind=."
    )


def _kind_of_name(name: str) -> Kind:
    if name in methods():
        return "method"
    if architecture_of(name) in models.entries() or name.startswith((TIMM, HF)):
        return "model"
    if name.replace("_", "-") in data_sets() or Path(name).exists() or "/" in name or name.endswith(".npz"):
        return "data"
    if "." not in name:
        known = [*methods(), *models.entries(), *data_sets()]
        raise unknown("method, model or data set", name, known, "pluribus list")
    return _kind_of(import_dotted(name, "target"))


def _kind_of_function(function: Callable[..., Any]) -> Kind:
    """A builder of models asks for the shape or the classes; a data function only for how data are read."""
    return "model" if inspect.signature(function).parameters.keys() - {"image_size", "seed", "reading"} else "data"


def _name(target: Any) -> str:
    if isinstance(target, str | Path):
        return str(target)
    if isinstance(target, Dataset):
        return target.name
    if isinstance(target, Method):
        return name_of(type(target))
    if isinstance(target, type) and issubclass(target, Method):
        return name_of(target)
    return getattr(target, "__name__", type(target).__name__)

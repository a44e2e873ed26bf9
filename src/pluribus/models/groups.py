"""Named groups of models from the papers, and the assignment of models to clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pluribus.errors import FormatError, MissingSettingError, unknown
from pluribus.internal.lookup import is_given
from pluribus.models.capacity import architecture_of
from pluribus.models.hf import HF
from pluribus.models.own import Models, name_model
from pluribus.models.timm import TIMM
from pluribus.models.zoo import LIST_COMMAND, entries


@dataclass(frozen=True)
class Group:
    """Client i gets model i mod len(models). `width`: common feature width K. None: each model keeps its own width."""

    models: tuple[str, ...]
    about: str
    width: int | None


_HTFE4 = ("cnn4", "googlenet", "mobilenet-v2", "resnet18")
_HTFE8 = (*_HTFE4, "resnet34", "resnet50", "resnet101", "resnet152")
_SHORT_RESNETS = ("resnet4", "resnet6", "resnet8", "resnet10")
_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")

GROUPS: dict[str, Group] = {
    "small": Group(("mlp-64", "cnn-16", "mlp-128-64", "cnn-16-32"), "four small models for 8x8 digits", 64),
    "small-gn": Group(
        ("mlp-64", "cnn-16", "mlp-128-64", "cnn-16-32-gn"), "small, with group norm, for differential privacy", 64
    ),
    "tiny": Group(("tiny-vit-32", "tiny-vit-48", "tiny-cnn-64"), "three pretrained backbones for 16x16 digits", None),
    "htfe2": Group(("cnn4", "resnet18"), "HtFE2 of FedL2G", 512),
    "htfe3": Group(("resnet10", "resnet18", "resnet34"), "HtFE3 of FedL2G", 512),
    "htfe4": Group(_HTFE4, "HtFE4 of FedL2G", 512),
    "htfe8": Group(_HTFE8, "HtFE8 of FedL2G", 512),
    "htfe9": Group((*_SHORT_RESNETS, *_RESNETS), "HtFE9 of FedL2G", 512),
    "htm10": Group((*_HTFE8, "vit-b16-mlp", "vit-b32-mlp"), "HtM10 of FedL2G; its heads differ", 512),
    "fedgh": Group(tuple(f"fedgh-cnn{number}" for number in range(1, 6)), "FedGH Table 2", 500),
    "fedfree": Group(("fedfree-cnn", *_RESNETS, "googlenet", "mobilenet-v2"), "FedFree Table A1", None),
    "fedhpl-vit": Group(("vit-s16", "vit-b16", "vit-l16", "vit-b16", "vit-s16"), "FedHPL Table 4", None),
    "fedhpl-resnet": Group(("resnet18", "resnet34", "resnet50", "resnet34", "resnet18"), "FedHPL Table 4", None),
    "fedhpl-homogeneous": Group(("vit-b16",), "FedHPL Table 4", None),
    "sensor5": Group(("cnn1d-3", "resnet1d", "lstm1d", "gru1d", "transformer1d"), "five small models for signals", 64),
    "text6": Group(
        ("fasttext", "textcnn", "textlstm", "textbilstm", "textgru", "texttransformer-2"),
        "six small models for tokens",
        64,
    ),
    "table4": Group(("table-mlp-2", "table-resnet", "ft-transformer", "logistic"), "four small models for tables", 64),
}


def assign(models: Models, clients: int) -> tuple[str, ...]:
    """Assign a model name to each client 0, 1, ...

    `models` is a group, a model or a dotted path, comma-separated names, a list of names and objects (client i gets
    item i mod length), or a mapping from client id to one of them.
    """
    if isinstance(models, str):
        models = GROUPS[models].models if models in GROUPS else tuple(name.strip() for name in models.split(","))
    if isinstance(models, Mapping):
        for client in range(clients):
            if client not in models:
                raise MissingSettingError(f"client {client} of {clients} has no model. Name a model for every client.")
        names = tuple(name_model(models[client]) for client in range(clients))
    else:
        names = tuple(name_model(models[client % len(models)]) for client in range(clients))
    known = entries()
    for name in dict.fromkeys(map(architecture_of, names)):
        if name in GROUPS:
            raise FormatError(f"'{name}' is a group, but one model is needed here: name the models of the group.")
        if not ("." in name or name.startswith((TIMM, HF)) or is_given(name) or name in known):
            raise unknown("model or group", name, [*known, *GROUPS], LIST_COMMAND)
    return names


def width_of(models: Models) -> int | None:
    """The width of a group. None: `models` is not a group, or its models keep their own widths."""
    return GROUPS[models].width if isinstance(models, str) and models in GROUPS else None

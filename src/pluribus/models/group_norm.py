"""Twins of models with batch normalization, in which groups of channels of one row are normalized.

Batch normalization mixes the rows of a batch, so no row has a gradient of its own. Group normalization (Wu and He,
ECCV 2018) has as many parameters, and each row is normalized by itself.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pluribus.models.capacity import architecture_of
from pluribus.models.probe import Shape
from pluribus.models.zoo import Builder, entries, register_model

SUFFIX = "-gn"
MOST_GROUPS, LEAST_CHANNELS = 32, 2  # in all, and in one group
TWINS = ("cnn-16-32", "resnet4", "resnet6", "resnet8", "resnet10", "resnet18", "resnet34", "resnet50")
SIGNAL_TWINS = ("cnn1d-3", "resnet1d")


def twin_of(model: str) -> str | None:
    """The name of the twin of a model, if there is one."""
    model = architecture_of(model)
    return f"{model}{SUFFIX}" if f"{model}{SUFFIX}" in entries() else None


def replace_norms(net: nn.Module) -> nn.Module:
    """Put group normalization in the place of all batch normalizations of a network."""
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                setattr(parent, name, nn.GroupNorm(_groups(child.num_features), child.num_features))
    return net


def _groups(channels: int) -> int:
    """The largest divisor of the channels that leaves at least two of them in each group."""
    most = min(MOST_GROUPS, max(1, channels // LEAST_CHANNELS))
    return next(number for number in range(most, 0, -1) if channels % number == 0)


def _twin(builder: Any) -> Builder:
    def backbone(shape: Shape) -> nn.Module:
        return replace_norms(builder(shape))

    return backbone


for _name in (*TWINS, *SIGNAL_TWINS):
    _entry = entries()[_name]
    register_model(f"{_name}{SUFFIX}", f"{_name} with group norm instead of batch norm", takes=_entry.takes)(
        _twin(_entry.builder)
    )

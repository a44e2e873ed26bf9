"""The layers of a model in the order of a forward pass, so that they can be matched and exchanged one by one."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pluribus.inputs import Input
from pluribus.models.probe import run_with_zeros

Kind = Literal["conv", "dwconv", "linear", "norm"]


class Layer(NamedTuple):
    """A module with trainable weights. `output`: it computes the logits. `groups`: the groups of a convolution."""

    name: str
    kind: Kind
    weight: tuple[int, ...]
    bias: tuple[int, ...] | None
    output: bool
    groups: int = 1


def layers_of(model: nn.Module, shape: Input | tuple[int, ...]) -> tuple[Layer, ...]:
    """All layers of a model in the order of first use. The model does not change, and may be on any device."""
    names = {module: name for name, module in model.named_modules()}
    order: dict[nn.Module, Kind] = {}

    def record(module: nn.Module, inputs: object, output: object) -> None:
        if (kind := kind_of(module)) is not None:
            order.setdefault(module, kind)

    hooks = [module.register_forward_hook(record) for module in names]
    modes = {module: module.training for module in names}
    model.eval()
    try:
        run_with_zeros(model, shape)
    finally:
        for module, training in modes.items():
            module.training = training
        for hook in hooks:
            hook.remove()
    last = next((m for m in reversed(order) if isinstance(m, nn.Linear)), None)
    return tuple(_layer(names[module], module, kind, module is last) for module, kind in order.items())


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of layer of a module. None: it has no trainable weights of its own."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return "dwconv" if module.groups > 1 and module.groups == module.in_channels else "conv"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm) and module.weight is not None:
        return "norm"
    return None


def _layer(name: str, module: nn.Module, kind: Kind, output: bool) -> Layer:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, torch.Tensor)
    groups = module.groups if isinstance(module, nn.Conv1d | nn.Conv2d) and kind == "conv" else 1
    shape = tuple(bias.shape) if isinstance(bias, torch.Tensor) else None
    return Layer(name, kind, tuple(weight.shape), shape, output, groups)


def batch_norms(model: nn.Module) -> set[str]:
    """The names of all weights and statistics of batch norm.

    >>> sorted(batch_norms(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))))
    ['1.num_batches_tracked', '1.running_mean', '1.running_var']
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return {f"{name}.{own}" for name, norm in norms.items() for own in norm.state_dict()}


def recurrent(model: nn.Module) -> bool:
    """Whether a model has layers that torch runs as one fused kernel over a whole sequence."""
    return any(isinstance(module, nn.RNNBase) for module in model.modules())

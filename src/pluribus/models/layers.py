"""The layers of a model in the order in which an image passes them: what can be matched and exchanged one by one."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import nn

from pluribus.models.probe import Shape

Kind = Literal["conv", "dwconv", "linear", "norm"]


class Layer(NamedTuple):
    """A module with trainable weights. `output`: it gives the logits."""

    name: str
    kind: Kind
    weight: tuple[int, ...]
    bias: tuple[int, ...] | None
    output: bool


def layers_of(model: nn.Module, shape: Shape) -> tuple[Layer, ...]:
    """All layers of a model on the meta device, traced by one forward pass; each is listed where it is first used."""
    names = {module: name for name, module in model.named_modules()}
    order: dict[nn.Module, Kind] = {}

    def note(module: nn.Module, inputs: object, output: object) -> None:
        kind = kind_of(module)
        if kind is not None:
            order.setdefault(module, kind)

    hooks = [module.register_forward_hook(note) for module in names]
    training = model.training
    model.eval()
    try:
        with torch.device("meta"), torch.no_grad():
            model(torch.zeros(1, *shape))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    last = next((m for m in reversed(order) if isinstance(m, nn.Linear)), None)
    return tuple(_layer(names[module], module, kind, module is last) for module, kind in order.items())


def kind_of(module: nn.Module) -> Kind | None:
    """What sort of layer a module is; None if it has no trainable weights of its own."""
    if isinstance(module, nn.Conv2d):
        return "dwconv" if module.groups > 1 and module.groups == module.in_channels else "conv"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm) and module.weight is not None:
        return "norm"
    return None


def _layer(name: str, module: nn.Module, kind: Kind, output: bool) -> Layer:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, torch.Tensor)
    return Layer(name, kind, tuple(weight.shape), tuple(bias.shape) if isinstance(bias, torch.Tensor) else None, output)

"""Low-rank adapters for frozen backbones (Hu et al., ICLR 2022): W x becomes W x + scale * B A x, and A and B learn.

They are attached to the linear layers that make queries, keys and values, whatever the model: a layer is recognized by
its own name. `merge_adapters` adds the products to the weights, so that a model of the plain architecture remains.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.errors import MismatchError, RangeError
from pluribus.inputs import Input
from pluribus.models.frozen import Frozen
from pluribus.models.probe import run_with_zeros
from pluribus.models.two_part import TwoPartModel

# Names of single layers for queries, keys or values, and of one layer for all three, in timm, Hugging Face and here.
_ATTENTION = re.compile(
    r"(w_?|to_|linear_)?(qkv|qk|kv|q|k|v|query|key|value|query_key_value)(_proj|_projection|_lin|_layer)?",
    re.IGNORECASE,
)


class Adapter(nn.Module):
    """A frozen linear layer with B (outputs, rank) and A (rank, inputs) beside it.

    `gain` has what each rank is multiplied by: the scale, or 0 if the rank is not used. `folded` is a product that was
    added to the weight before; the weight itself stays that of the pretrained backbone.
    """

    gain: Tensor
    folded: Tensor | None

    def __init__(self, base: nn.Linear, rank: int, scale: float, folds: bool) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.zeros(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.register_buffer("gain", torch.full((rank,), scale))
        self.register_buffer("folded", torch.zeros(base.out_features, base.in_features) if folds else None)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight if self.folded is None else self.base.weight + self.folded
        return F.linear(x, weight, self.base.bias) + F.linear(F.linear(x, self.a) * self.gain, self.b)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """A from N(0, 1 / inputs), and B zero: the model starts as it was."""
        self.a.copy_(torch.randn(self.a.shape, generator=generator) * self.a.shape[1] ** -0.5)
        self.b.zero_()

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The linear layer with the same outputs."""
        self.base.weight += (self.b * self.gain) @ self.a
        if self.folded is not None:
            self.base.weight += self.folded
        return self.base


class Adapted(Frozen):
    """A frozen backbone with adapters in its attention layers."""

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.net(x)
        return features


def attach_adapters(model: TwoPartModel, rank: int, scale: float, folds: bool = False) -> None:
    """Freeze the backbone of a model and add adapters to it. They are zero until they are drawn or received."""
    owner, name = (model.features, "backbone") if hasattr(model.features, "backbone") else (model, "features")
    backbone = Adapted(getattr(owner, name))
    for path, layer in _attention_layers(backbone.net).items():
        parent, _, last = path.rpartition(".")
        setattr(backbone.net.get_submodule(parent), last, Adapter(layer, rank, scale, folds))
    setattr(owner, name, backbone)


def _attention_layers(net: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers for queries, keys and values, by their path."""
    return {
        path: module
        for path, module in net.named_modules()
        if isinstance(module, nn.Linear) and _ATTENTION.fullmatch(path.rpartition(".")[2])
    }


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of a model, by the path of their layer in the backbone."""
    return {
        path: module
        for backbone in _adapted(model)
        for path, module in backbone.net.named_modules()
        if isinstance(module, Adapter)
    }


def parameters_beside(model: nn.Module) -> dict[str, nn.Parameter]:
    """The other parameters of a model that learn: its head, and its projector."""
    own = {id(p) for adapter in adapters_of(model).values() for p in adapter.parameters()}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in own}


def frozen_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the backbone's tensors that adapters leave as they are."""
    adapters = adapters_of(model).values()
    changing = {id(t) for one in adapters for t in (one.a, one.b, one.gain, one.folded)}
    tensors = {id(t) for net in _adapted(model) for t in net.state_dict(keep_vars=True).values()} - changing
    return tuple(name for name, value in model.state_dict(keep_vars=True).items() if id(value) in tensors)


def _adapted(model: nn.Module) -> list[Adapted]:
    return [module for module in model.modules() if isinstance(module, Adapted)]


def check_adapters(model: TwoPartModel, rank: int, shape: Input, name: str) -> None:
    """Attach adapters to a model on the meta device. Refuse a model that cannot have them, or not of this rank."""
    with torch.device("meta"):
        attach_adapters(model, rank, 1.0)
    adapters = adapters_of(model)
    if not adapters:
        raise MismatchError(
            f"model '{name}' cannot have adapters: it has no linear layers for the queries, keys and values of "
            f"attention. Use a transformer, such as --models tiny-vit-32."
        )
    for path, adapter in adapters.items():
        most = min(adapter.base.weight.shape)
        if rank > most:
            raise RangeError(
                f"rank {rank} is above {most}, the width of layer '{path}' of model '{name}'. Use smaller ranks in "
                f"--capacity."
            )
    if not _all_called(model, adapters.values(), shape):
        raise MismatchError(
            f"model '{name}' cannot have adapters: it does not call its layers for queries, keys and values, but uses "
            f"their weights in another way. Use another transformer."
        )


def _all_called(model: nn.Module, adapters: Collection[Adapter], shape: Input) -> bool:
    """Whether a forward pass calls every adapter. Others would never learn."""
    called = set[nn.Module]()
    hooks = [one.register_forward_hook(lambda module, *_: called.add(module)) for one in adapters]
    try:
        run_with_zeros(model, shape)
    except AttributeError:  # an adapter has no weight of its own
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return called >= set(adapters)


def merge_adapters(model: nn.Module) -> nn.Module:
    """A copy of a model with the products of its adapters in its weights; a model without adapters itself."""
    if not adapters_of(model):
        return model
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        parent, _, last = path.rpartition(".")
        if isinstance(module, Adapter):
            setattr(model.get_submodule(parent), last, module.merged())
    for path, module in list(model.named_modules()):
        parent, _, last = path.rpartition(".")
        if isinstance(module, Adapted):
            setattr(model.get_submodule(parent), last, module.net)
    return model

"""A model with a share of its channels, and which weights of the whole model it holds.

A share s of K channels is ceil(s K) of them, in every layer and in both directions. The rows that a model takes stay
whole, and so do the outputs of its head. Layers of equal width hold the same channels, so that they can be added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd, _MaxPoolNd
from torch.overrides import TorchFunctionMode

from pluribus.errors import MismatchError
from pluribus.inputs import Input
from pluribus.models.attention import HEADS
from pluribus.models.probe import run_with_zeros

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_CHANNELS_FIRST = (*_CONVOLUTIONS, _BatchNorm, nn.GroupNorm, _MaxPoolNd, _AvgPoolNd, _AdaptiveAvgPoolNd)


class Dimension(NamedTuple):
    """How the channels of a layer lie along a dimension of its weight: groups of channels of `inner` numbers each."""

    groups: int = 1
    inner: int = 1

    def kept(self, size: int, share: float) -> int:
        """The size of this dimension in a model with a share of the channels."""
        blocks = self.groups * self.inner
        return blocks * math.ceil(size // blocks * share)

    def indices(self, size: int, kept: int, first: int) -> Tensor:
        """The numbers that are kept: a window of channels from the first one on, which goes around the end."""
        channels, some = size // (self.groups * self.inner), kept // (self.groups * self.inner)
        window = (torch.arange(some) + first) % channels
        every = torch.arange(self.groups)[:, None, None] * channels + window[:, None]
        return (every * self.inner + torch.arange(self.inner)).flatten()


@dataclass
class Structure:
    """How the channels of a network are connected."""

    entry: nn.Module | None = None  # the layer that takes rows
    lookups: list[nn.Module] = field(default_factory=list)  # embeddings before it, of a table's categories
    dimensions: dict[tuple[nn.Module, str], Dimension] = field(
        default_factory=dict
    )  # of inputs and outputs, if special

    def of(self, module: nn.Module, side: str) -> Dimension:
        return self.dimensions.get((module, side), Dimension())


class _Joins(TorchFunctionMode):
    """Refuses networks that join channels: the first channels of two layers are not the first of both together.

    A table's row may be joined of numbers and embedded categories, which then stay whole.
    """

    def __init__(self, found: Structure) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat:
            dimensions, at = args[0][0].dim(), (args[1:2] or (kwargs.get("dim", 0),))[0]
            if dimensions == 4 and at in (1, -3):
                raise MismatchError("it joins the channels of several layers")
            if dimensions == 2 and at in (1, -1) and isinstance(self._found.entry, nn.Embedding | None):
                self._found.entry = None  # what takes the joined row
        return func(*args, **kwargs)


def structure_of(net: nn.Module, shape: Input | tuple[int, ...]) -> Structure:
    """Run a network once, and note which layer takes rows, where images are flattened, and where attention is."""
    found = Structure()
    last: tuple[int, ...] | None = None  # channels and pixels of the last layer with images

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal last
        if isinstance(module, nn.Embedding) and isinstance(found.entry, nn.Embedding | None):
            found.lookups.append(module)
            found.entry = module
        elif found.entry is None and isinstance(module, (*_CONVOLUTIONS, nn.Linear)):
            found.entry = module
        elif isinstance(module, nn.Linear) and last is not None and inputs[0].dim() == 2:
            if math.prod(last) == module.in_features:
                found.dimensions[module, "in"] = Dimension(inner=math.prod(last[1:]))
            last = None
        if isinstance(module, _CHANNELS_FIRST) and isinstance(output, Tensor):
            last = tuple(output.shape[1:])

    hooks = [module.register_forward_hook(note) for module in net.modules()]
    try:
        with _Joins(found):
            run_with_zeros(net, shape)
    finally:
        for hook in hooks:
            hook.remove()
    for module in net.modules():
        if isinstance(qkv := getattr(module, "qkv", None), nn.Linear):
            heads = getattr(module, "num_heads", HEADS)
            found.dimensions[qkv, "out"] = Dimension(3 * heads)
            found.dimensions[module.proj, "in"] = Dimension(heads)  # type: ignore[index]
    return found


def narrow(net: nn.Module, share: float, name: str, shape: Input | tuple[int, ...]) -> nn.Module:
    """Replace the layers of a network by layers with a share of their channels. They have torch's initial weights."""
    try:
        structure = structure_of(net, shape)
        for parent in list(net.modules()):
            for own, child in list(parent.named_children()):
                if (smaller := _narrow_layer(child, share, structure)) is not None:
                    setattr(parent, own, smaller)
            _narrow_own(parent, share)
        run_with_zeros(net, shape)
    except (MismatchError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise MismatchError(
            f"model '{name}' cannot be cut to a share of {share:g} of its width: {why}. Use a perceptron, a plain CNN, "
            f"a ResNet or a transformer, or leave out the capacity."
        ) from error
    return net


def _narrow_layer(layer: nn.Module, share: float, structure: Structure) -> nn.Module | None:
    """The same layer with fewer channels. None: it has no weights of its own."""

    def kept(size: int, side: str) -> int:
        is_lookup = layer in structure.lookups and not isinstance(structure.entry, nn.Embedding)
        if is_lookup or (side == "in" and layer is structure.entry):
            return size
        return structure.of(layer, side).kept(size, share)

    if isinstance(layer, _CONVOLUTIONS):
        before, after = kept(layer.in_channels, "in"), kept(layer.out_channels, "out")
        if layer.groups not in (1, layer.in_channels):
            raise MismatchError(f"a convolution has {layer.groups} groups of channels")
        groups = 1 if layer.groups == 1 else before
        form = layer.kernel_size, layer.stride, layer.padding, layer.dilation, groups, layer.bias is not None
        return type(layer)(before, after, *form, layer.padding_mode)  # type: ignore[arg-type]
    if isinstance(layer, nn.Linear):
        return nn.Linear(kept(layer.in_features, "in"), kept(layer.out_features, "out"), layer.bias is not None)
    if isinstance(layer, nn.Embedding):
        return nn.Embedding(layer.num_embeddings, kept(layer.embedding_dim, "out"), layer.padding_idx)
    if isinstance(layer, _BatchNorm):
        about = layer.eps, layer.momentum, layer.affine, layer.track_running_stats
        return type(layer)(kept(layer.num_features, "out"), *about)
    if isinstance(layer, nn.GroupNorm):
        channels = kept(layer.num_channels, "out")
        return nn.GroupNorm(math.gcd(layer.num_groups, channels), channels, layer.eps, layer.affine)
    if isinstance(layer, nn.LayerNorm):
        *outer, last = layer.normalized_shape
        return nn.LayerNorm([*outer, kept(last, "out")], layer.eps, layer.elementwise_affine)
    if not list(layer.children()) and list(layer.parameters(recurse=False)):
        raise MismatchError(f"it has a layer of another kind, {type(layer).__name__}")
    return None


def _narrow_own(module: Any, share: float) -> None:
    """Narrow what a module holds beside its layers: tokens and positions of transformers, and sizes that it computes
    with."""
    for name, value in list(module.named_parameters(recurse=False)):
        if list(module.children()):
            setattr(module, name, nn.Parameter(value.detach()[..., : math.ceil(value.shape[-1] * share)].clone()))
    if isinstance(head := getattr(module, "head_dim", None), int):  # attention of timm
        module.head_dim = math.ceil(head * share)
        module.attn_dim = module.num_heads * module.head_dim
        module.scale = module.head_dim**-0.5
    if isinstance(width := getattr(module, "embed_dim", None), int):
        module.embed_dim = math.ceil(width * share)


class Part:
    """Which numbers of a whole model's tensors a narrow model holds."""

    def __init__(self, indices: Mapping[str, tuple[Tensor | None, ...]]) -> None:
        self._indices = indices  # by name and dimension; None: all

    def take(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the narrow model, copied from those of the whole one."""
        return {name: self._take(whole[name].detach(), some) for name, some in self._indices.items()}

    @staticmethod
    def _take(value: Tensor, indices: tuple[Tensor | None, ...]) -> Tensor:
        for at, some in enumerate(indices):
            if some is not None:
                value = value.index_select(at, some)
        return value.clone()

    def at(self, name: str) -> tuple[Any, ...]:
        """Where the numbers of a tensor are, as an index of the whole model's tensor."""
        indices = self._indices[name]
        picked = [some for some in indices if some is not None]
        if len(picked) < 2:
            return (*(slice(None) if some is None else some for some in indices), ...)
        # both are the first dimensions of a weight: outputs and inputs
        return picked[0][:, None], picked[1]


class Cut:
    """How a narrow model is cut out of a whole one."""

    def __init__(self, whole: nn.Module, small: nn.Module, shape: Input | tuple[int, ...]) -> None:
        structure, sizes = structure_of(whole, shape), small.state_dict()
        self._dimensions: dict[str, list[tuple[Dimension, int, int]]] = {}  # of each tensor, with both sizes
        for prefix, module in whole.named_modules():
            own = {name: value for name, value in module.state_dict().items() if "." not in name}
            for name, value in own.items():
                path = f"{prefix}.{name}" if prefix else name
                forms = [structure.of(module, side) for side in _sides(module, name, value.dim())]
                self._dimensions[path] = list(zip(forms, value.shape, sizes[path].shape, strict=True))

    def part(self, first: int = 0) -> Part:
        """The part that holds, in a layer of K channels, those from `first` mod K on."""

        def indices(form: Dimension, full: int, kept: int) -> Tensor | None:
            return None if full == kept else form.indices(full, kept, first)

        return Part({name: tuple(indices(*one) for one in some) for name, some in self._dimensions.items()})


def _sides(module: nn.Module, name: str, dimensions: int) -> tuple[str, ...]:
    """What each dimension of a tensor counts: outputs, inputs or something else."""
    if name == "weight" and isinstance(module, (*_CONVOLUTIONS, nn.Linear)):
        return ("out", "in", *("",) * (dimensions - 2))
    return ("",) * (dimensions - 1) + ("out",) * min(1, dimensions)

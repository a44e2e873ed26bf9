"""The stages of a network, a network with the first of them, and what follows a stage: its exit.

A ResNet has a stage per `layerN`, a transformer one per block. In an `nn.Sequential`, each block begins a stage; if it
has no blocks, each convolution does; if it has none of those either, each linear layer. What comes before the first
stage belongs to it. What follows the last stage is the tail: pooling, a last normalization, hidden layers.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd

from pluribus.errors import MismatchError
from pluribus.inputs import Input
from pluribus.models.probe import run_with_zeros
from pluribus.models.two_part import TwoPartModel

_WEIGHTED = (_ConvNd, nn.Linear)
_BEGIN_TAIL = (nn.Flatten, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, *_WEIGHTED)
_LAYER = re.compile(r"layer[1-9][0-9]*")
_TOKEN_TAIL = ("norm", "fc_norm")  # what follows the blocks of a transformer, by timm's names
_POOLS = ("token", "avg")
INNER = "net"  # the name of a network after layers that only prepare images
WITH_PROJECTOR = "features.backbone."  # the names of a backbone before a projector
HAVE_STAGES = "a ResNet, a plain CNN, a perceptron or a transformer"


@dataclass(frozen=True)
class Stages:
    """Where the stages of a network are."""

    net: Any  # the network that has them
    prefix: str  # of its names in the backbone
    parts: tuple[tuple[str, ...], ...]  # the names of what each stage has
    ends: tuple[nn.Module, ...]  # the last layer of each stage
    tail: tuple[str, ...]  # the names of what follows the last stage


@dataclass(frozen=True)
class Chain(Stages):
    """Stages of children that run one after the other."""

    def keep(self, depth: int) -> None:
        for names in self.parts[depth:]:
            self._drop(*names)

    def drop_weighted_tail(self) -> None:
        """Leave out the first layer of the tail that has weights, and all after it."""
        has_weights = [next(self.net.get_submodule(name).parameters(), None) is not None for name in self.tail]
        if True in has_weights:
            self._drop(*self.tail[has_weights.index(True) :])

    def without_stages(self, model: str) -> nn.Module:
        self.keep(0)
        return self.net  # type: ignore[no-any-return]

    def _drop(self, *names: str) -> None:
        for name in names:
            setattr(self.net, name, nn.Identity())  # the names of all others stay


@dataclass(frozen=True)
class Blocks(Stages):
    """Stages that are blocks of a transformer."""

    blocks: nn.Sequential | nn.ModuleList

    def keep(self, depth: int) -> None:
        del self.blocks[depth:]

    def drop_weighted_tail(self) -> None:
        """All blocks have outputs of one width, so the tail fits each of them."""

    def without_stages(self, model: str) -> nn.Module:
        if getattr(self.net, "global_pool", None) not in _POOLS:
            raise MismatchError(
                f"model '{model}' can have no exits: what follows its blocks needs more than their outputs. Use a "
                f"ResNet, a plain CNN, a perceptron, or a transformer with a class token."
            )
        self.keep(0)
        return TokenTail(self.net)


class TokenTail(nn.Module):
    """What follows the blocks of a transformer: a normalization, and the class token or the mean over tokens."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.pool, self.prefix_tokens = net.global_pool, net.num_prefix_tokens
        for name in ("layers",) if hasattr(net, "layers") else _TOKEN_TAIL:
            if isinstance(child := getattr(net, name, None), nn.Module):
                self.add_module(name, child)

    def forward(self, tokens: Tensor) -> Tensor:
        children = dict(self.named_children())
        after = children.pop("fc_norm", nn.Identity())
        for child in children.values():
            tokens = child(tokens)
        pooled = tokens[:, 0] if self.pool == "token" else tokens[:, self.prefix_tokens :].mean(1)
        features: Tensor = after(pooled)
        return features


def stages_of(backbone: nn.Module, model: str = "") -> Chain | Blocks:
    """Find the stages of a backbone. A model without stages is refused, by its name."""
    prefix, net = "", backbone
    while isinstance(net, nn.Sequential) and (children := list(net.named_children())) and children[-1][0] == INNER:
        prefix, net = f"{prefix}{INNER}.", children[-1][1]  # after layers that only prepare images
    for name, owner in (("", net), ("layers.", getattr(net, "layers", None))):
        blocks = getattr(owner, "blocks", None)
        if isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks):
            numbered = tuple((f"{name}blocks.{number}",) for number in range(len(blocks)))
            tail = tuple(f"{name}{part}" for part in _TOKEN_TAIL)
            return Blocks(net, prefix, numbered, tuple(blocks), tail, blocks)
    names = [name for name, child in net.named_children() if not isinstance(child, nn.Identity)]
    first, end = _units(net, names)
    if not first:
        raise MismatchError(f"model '{model}' has no stages that could be cut off. Use {HAVE_STAGES}.")
    starts = [0, *first[1:], end]
    parts = tuple(tuple(names[a:b]) for a, b in itertools.pairwise(starts))
    ends = tuple(net.get_submodule(part[-1]) for part in parts)
    return Chain(net, prefix, parts, ends, tuple(names[end:]))


def _units(net: nn.Module, names: list[str]) -> tuple[list[int], int]:
    """Where the layers or blocks are that begin a stage, and where the last stage ends."""
    children = [net.get_submodule(name) for name in names]
    if hasattr(net, "layer1"):
        blocks = [at for at, name in enumerate(names) if _LAYER.fullmatch(name)]
    elif isinstance(net, nn.Sequential):
        blocks = [at for at, child in enumerate(children) if _is_block(child)]
    else:
        return [], 0
    if blocks:
        return blocks, blocks[-1] + 1
    for kind in _WEIGHTED:
        if first := [at for at, child in enumerate(children) if isinstance(child, kind)]:
            after = range(first[-1] + 1, len(names))
            return first, next((at for at in after if isinstance(children[at], _BEGIN_TAIL)), len(names))
    return [], 0


def _is_block(child: nn.Module) -> bool:
    return not isinstance(child, _WEIGHTED) and any(isinstance(part, _WEIGHTED) for part in child.modules())


def shorten(backbone: nn.Module, depth: int, name: str, shape: Input | tuple[int, ...]) -> nn.Module:
    """Leave the first stages of a backbone, and of its tail what fits them. The names of weights stay."""
    stages = stages_of(backbone, name)
    if depth > (most := len(stages.ends)):
        raise MismatchError(
            f"model '{name}' cannot be cut to a depth of {depth}: it has {most} stage{'s' * (most > 1)}. Use a depth "
            f"of at most {most}."
        )
    if depth == most:
        return backbone
    stages.keep(depth)
    try:
        run_with_zeros(backbone, shape)
    except RuntimeError:  # hidden layers for the outputs of the last stage
        stages.drop_weighted_tail()
    return backbone


# ---- exits -----------------------------------------------------------------------------------------------------------


def _backbone_of(model: TwoPartModel) -> tuple[str, nn.Module]:
    """The backbone of a model, and the prefix of its names."""
    inner = getattr(model.features, "backbone", None)
    return ("features.", model.features) if inner is None else (WITH_PROJECTOR, inner)


def depth_of(model: TwoPartModel, name: str) -> int:
    """The number of stages of a model."""
    return len(stages_of(_backbone_of(model)[1], name).ends)


def exit_of(model: TwoPartModel, name: str) -> TwoPartModel:
    """What follows the last stage of a model, as a model of the outputs of that stage. It takes the model apart."""
    prefix, backbone = _backbone_of(model)
    stages = stages_of(backbone, name)
    left = stages.without_stages(name)
    for outer in filter(None, stages.prefix.split(".")):
        left = nn.Sequential(OrderedDict({outer: left}))
    model.set_submodule(prefix.removesuffix("."), left)
    return model


def part_names(model: TwoPartModel) -> dict[str, str]:
    """Where each tensor of a model belongs: to `stageN`, or to the exit after the last stage, `exitN`."""
    prefix, backbone = _backbone_of(model)
    stages = stages_of(backbone)
    inside = f"{prefix}{stages.prefix}"
    beside = ("features.projector.", "head.") if prefix == WITH_PROJECTOR else ("head.",)
    after = (*beside, *(f"{inside}{name}." for name in stages.tail))
    starts = [tuple(f"{inside}{name}." for name in part) for part in stages.parts]
    found = {}
    for name in model.state_dict():
        number = next((number for number, start in enumerate(starts, 1) if name.startswith(start)), 1)
        found[name] = f"exit{len(starts)}" if name.startswith(after) else f"stage{number}"
    return found


def run_stages(model: TwoPartModel, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """The outputs of all stages but the last, and the scores of the model."""
    found: list[Tensor] = []
    ends = stages_of(_backbone_of(model)[1]).ends[:-1]
    hooks = [end.register_forward_hook(lambda _, __, output: found.append(output)) for end in ends]
    try:
        scores: Tensor = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found, scores

"""What a network gives for an image, found without touching the network."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

Shape = tuple[int, int, int]
_SMALL = 10_000_000  # parameters


def shape_text(shape: Shape) -> str:
    """Channels, height and width as a user writes them: 3x32x32."""
    return "x".join(map(str, shape))


def output_width(net: nn.Module, shape: Shape) -> int:
    """The D of the (B, D) that `net` gives for images of this shape. `net` may live on any device and stays as it is.

    Images that do not fit raise torch's own RuntimeError.
    """
    output = _through(net, shape)
    if not isinstance(output, torch.Tensor) or output.dim() != 2:
        raise RuntimeError("it must give one flat vector for each image")
    return output.shape[1]


def normalised_pixels(net: nn.Module, shape: Shape) -> int | None:
    """The fewest pixels that a batch normalisation in `net` sees of one image; None if there is none.

    >>> normalised_pixels(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (1, 8, 8))
    36
    """
    seen: list[int] = []

    def look(_: nn.Module, images: tuple[torch.Tensor]) -> None:
        seen.append(images[0][0, 0].numel())

    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    try:
        if hooks:
            _through(net, shape)
    finally:
        for hook in hooks:
            hook.remove()
    return min(seen, default=None)


def _through(net: nn.Module, shape: Shape) -> Any:
    """What a net of zeros gives for two images."""
    # The meta device computes nothing, but torch takes a second to load what it needs for the first matrix product on
    # it; a small network is through in a millisecond on zeros.
    size = sum(parameter.numel() for parameter in net.parameters())
    device = torch.device("cpu" if size < _SMALL else "meta")
    stand_ins = {
        name: torch.zeros_like(tensor, device=device)
        for name, tensor in chain(net.named_parameters(), net.named_buffers())
    }
    kind = next((tensor.dtype for tensor in stand_ins.values() if tensor.is_floating_point()), torch.float32)
    # Two images, because batch normalisation in training refuses one; a forked generator, because the weights that are
    # drawn next must not depend on whether someone looked before.
    with device, torch.no_grad(), torch.random.fork_rng(devices=[]):
        return functional_call(net, stand_ins, (torch.zeros(2, *shape, dtype=kind),))

"""The output shape of a network for an image, measured without changing the network."""

from __future__ import annotations

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
    """The D of the output (B, D) of `net` for images of this shape. `net` may be on any device. It does not change.

    Images of a wrong shape raise torch's own RuntimeError.
    """
    output = run_with_zeros(net, shape)
    if not isinstance(output, torch.Tensor) or output.dim() != 2:
        raise RuntimeError("it must return one flat vector for each image")
    return output.shape[1]


def normalized_pixels(net: nn.Module, shape: Shape) -> int | None:
    """The smallest number of pixels per image in a batch normalization of `net`. None: `net` has none.

    >>> normalized_pixels(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (1, 8, 8))
    36
    """
    seen: list[int] = []

    def record(_: nn.Module, images: tuple[torch.Tensor]) -> None:
        seen.append(images[0][0, 0].numel())

    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    hooks = [norm.register_forward_pre_hook(record) for norm in norms]
    try:
        if hooks:
            run_with_zeros(net, shape)
    finally:
        for hook in hooks:
            hook.remove()
    return min(seen, default=None)


def run_with_zeros(net: nn.Module, shape: Shape) -> Any:
    """The output for two images of zeros, with zeros as weights."""
    # The meta device computes nothing, but its first matrix product makes torch load code for a second. On zeros, a
    # small network takes a millisecond.
    tensors = dict([*net.named_parameters(), *net.named_buffers()])
    device = torch.device("cpu" if sum(tensor.numel() for tensor in tensors.values()) < _SMALL else "meta")
    # not zeros_like, which makes torch load code for half a second if the tensor is on the meta device
    stand_ins = {name: torch.zeros(one.shape, dtype=one.dtype, device=device) for name, one in tensors.items()}
    kind = next((tensor.dtype for tensor in stand_ins.values() if tensor.is_floating_point()), torch.float32)
    # Two images, because batch normalization in train mode refuses one. A forked generator, because this pass must not
    # change the weights that are drawn next.
    with device, torch.no_grad(), torch.random.fork_rng(devices=[]):
        return functional_call(net, stand_ins, (torch.zeros(2, *shape, dtype=kind),))

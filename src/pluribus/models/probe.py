"""The output shape of a network for a row, measured without changing the network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from pluribus.inputs import Input, as_input

Shape = tuple[int, ...]  # of one row
_SMALL = 10**11  # parameters times pixels or time steps: a bound of the products, up to a second of one core
_MOST_NUMBERS = 2**27  # parameters, or numbers of a row, for which memory is taken: a file may claim any number


def shape_text(shape: Shape) -> str:
    """Channels, height and width as a user writes them: 3x32x32."""
    return "x".join(map(str, shape))


def output_width(net: nn.Module, shape: Input | tuple[int, ...]) -> int:
    """The D of the output (B, D) of `net` for such rows. `net` may be on any device. It does not change.

    Rows of a wrong shape raise torch's own RuntimeError.
    """
    output = run_with_zeros(net, shape)
    if not isinstance(output, torch.Tensor) or output.dim() != 2:
        raise RuntimeError("it must return one flat vector for each row")
    return output.shape[1]


def normalized_pixels(net: nn.Module, shape: Input | tuple[int, ...]) -> int | None:
    """The smallest number of pixels or time steps per row in a batch normalization of `net`. None: `net` has none.

    >>> normalized_pixels(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), (1, 8, 8))
    36
    """
    seen: list[int] = []

    def record(_: nn.Module, rows: tuple[torch.Tensor]) -> None:
        seen.append(rows[0][0, 0].numel())

    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    hooks = [norm.register_forward_pre_hook(record) for norm in norms]
    try:
        if hooks:
            run_with_zeros(net, shape)
    finally:
        for hook in hooks:
            hook.remove()
    return min(seen, default=None)


def run_with_zeros(net: nn.Module, shape: Input | tuple[int, ...]) -> Any:
    """The output for two rows of zeros, with zeros as weights."""
    # The meta device computes nothing, but makes torch load its compiler for a second. On zeros, a small network takes
    # a millisecond, and a ResNet-152 on 32 x 32 pixels a tenth of a second.
    weights, buffers, form = dict(net.named_parameters()), dict(net.named_buffers()), as_input(shape)
    size = sum(tensor.numel() for tensor in (*weights.values(), *buffers.values()))
    numbers = max(size, math.prod(form.shape))
    is_small = numbers < _MOST_NUMBERS and size * math.prod(form.shape[1:]) < _SMALL
    device = torch.device("cpu" if is_small else "meta")
    # not zeros_like, which makes torch load code for half a second if the tensor is on the meta device
    stand_ins = {name: torch.zeros(one.shape, dtype=one.dtype, device=device) for name, one in buffers.items()}
    stand_ins |= _zeros(weights, device)
    kind = next((tensor.dtype for tensor in stand_ins.values() if tensor.is_floating_point()), torch.float32)
    # Two rows, because batch normalization in train mode refuses one. A forked generator, because this pass must not
    # change the weights that are drawn next.
    with _one_thread(), _skipped_norms(net), device, torch.no_grad(), torch.random.fork_rng(devices=[]):
        return functional_call(net, stand_ins, (form.zeros(2, kind),))


def _zeros(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Zeros of these shapes, all in the same memory: new memory of the size of a model takes time to fill."""
    largest: dict[torch.dtype, int] = {}
    for one in weights.values():
        largest[one.dtype] = max(largest.get(one.dtype, 0), one.numel())
    blocks = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in largest.items()}
    return {name: blocks[one.dtype][: one.numel()].view(one.shape) for name, one in weights.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in this thread alone: for two rows, waiting for other threads takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _skipped_norms(net: nn.Module) -> Iterator[None]:
    """Batch normalizations that only check their input: they change no shape, and each one takes milliseconds."""
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        norm.forward = partial(_check_channels, norm)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def _check_channels(norm: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    if x.shape[1] != norm.num_features:
        raise RuntimeError(f"a batch normalization of {norm.num_features} channels gets {x.shape[1]}")
    return x

"""Multiply-adds: how much a model computes.

Counted are the products in convolutions, linear layers and attention, each with the sum that it goes into. Everything
else, such as normalization, pooling, activations and optimizers, is left out: it is small beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pluribus.inputs import Input
from pluribus.models.probe import run_with_zeros

ROWS = 2  # of a run with zeros


class Count:
    """Multiply-adds so far."""

    def __init__(self, mode: FlopCounterMode) -> None:
        self._mode = mode

    @property
    def multiply_adds(self) -> int:
        return self._mode.get_total_flops() // 2  # which counts a product and a sum as two


@contextmanager
def counting() -> Iterator[Count]:
    """Count all multiply-adds of this thread, forward and backward."""
    # fused kernels are not counted: let attention and LSTMs use plain products
    mha, mkldnn = torch.backends.mha, torch.backends.mkldnn
    attention, lstm = mha.get_fastpath_enabled(), mkldnn.enabled
    mha.set_fastpath_enabled(False)
    mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as mode:
            yield Count(mode)
    finally:
        mha.set_fastpath_enabled(attention)
        mkldnn.enabled = lstm


def multiply_adds(net: nn.Module, shape: Input | tuple[int, ...]) -> int:
    """Multiply-adds of one forward pass of one row. Training takes about three times as many: the backward pass
    computes gradients of inputs and of weights.

    >>> multiply_adds(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8))
    640
    """
    with counting() as count:
        run_with_zeros(net, shape)
    return count.multiply_adds // ROWS

"""Models for signals (n, channels, length): convolutions, recurrent layers and a transformer. All have 64 features."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.models.attention import Blocks
from pluribus.models.probe import Shape
from pluribus.models.zoo import Builder, register_model

WIDTH = 64
KERNEL = 9  # time steps that one output of a convolution sees
PATCH = 4  # time steps of one token of the transformer


def _cnn(filters: Sequence[int], strides: Sequence[int]) -> Builder:
    """Convolutions with batch normalization and ReLU, then the mean over time."""

    def backbone(shape: Shape) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        before = shape[0]
        for number, (width, stride) in enumerate(zip(filters, strides, strict=True), 1):
            layers[f"conv{number}"] = nn.Conv1d(before, width, KERNEL, stride, KERNEL // 2)
            layers[f"conv{number}_norm"] = nn.BatchNorm1d(width)
            layers[f"conv{number}_relu"] = nn.ReLU()
            before = width
        return nn.Sequential(layers | {"pool": nn.AdaptiveAvgPool1d(1), "flatten": nn.Flatten()})

    return backbone


class Residual(nn.Module):
    """Two convolutions of 5 time steps, added to the input, or to a convolution of it if its shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(before, width, 5, stride, 2, bias=False)
        self.norm1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, width, 5, padding=2, bias=False)
        self.norm2 = nn.BatchNorm1d(width)
        changes = before != width or stride != 1
        self.skip = nn.Conv1d(before, width, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(found + self.skip(x))


def _resnet(shape: Shape) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv1d(shape[0], 32, KERNEL, padding=KERNEL // 2, bias=False),
            stem_norm=nn.BatchNorm1d(32),
            stem_relu=nn.ReLU(),
            block1=Residual(32, 32, 1),
            block2=Residual(32, WIDTH, 2),
            block3=Residual(WIDTH, WIDTH, 2),
            pool=nn.AdaptiveAvgPool1d(1),
            flatten=nn.Flatten(),
        )
    )


class Recurrent(nn.Module):
    """A recurrent layer over time steps. The features are the mean of its states."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU], channels: int) -> None:
        super().__init__()
        self.layer = layer(channels, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.layer(x.transpose(1, 2))[0]
        return states.mean(1)


class Transformer(nn.Module):
    """Two transformer blocks over patches of time steps, with learned positions. The features are the mean."""

    num_prefix_tokens = 0
    global_pool = "avg"

    def __init__(self, channels: int, length: int) -> None:
        super().__init__()
        self.missing = -length % PATCH  # zeros that fill the last patch
        self.patches = nn.Conv1d(channels, WIDTH, PATCH, PATCH)
        positions = torch.empty(1, (length + self.missing) // PATCH, WIDTH)
        self.positions = nn.Parameter(positions.normal_().mul_(0.02))  # in place, because of `meta.py`
        self.layers = Blocks(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(F.pad(x, (0, self.missing))).transpose(1, 2)
        mixed: Tensor = self.layers(tokens + self.positions)
        return mixed.mean(1)


register_model("cnn1d-2", "two convolutions of 9 time steps, 32 and 64 filters", takes="signal")(_cnn((32, 64), (3, 3)))
register_model("cnn1d-3", "three convolutions of 9 time steps, 32 to 64 filters", takes="signal")(
    _cnn((32, 64, 64), (2, 2, 2))
)
register_model("cnn1d-4", "four convolutions of 9 time steps, 32 to 128 filters", takes="signal")(
    _cnn((32, 64, 128, 64), (1, 2, 2, 2))
)
register_model("resnet1d", "ResNet of three blocks for signals, 32 to 64 filters", takes="signal")(_resnet)
register_model("lstm1d", "LSTM of width 64 over time steps, mean state", takes="signal")(
    lambda shape: Recurrent(nn.LSTM, shape[0])
)
register_model("gru1d", "GRU of width 64 over time steps, mean state", takes="signal")(
    lambda shape: Recurrent(nn.GRU, shape[0])
)
register_model("transformer1d", "two transformer blocks of width 64 over patches of 4 time steps", takes="signal")(
    lambda shape: Transformer(*shape)
)

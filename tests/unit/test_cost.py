"""Multiply-adds of models, by hand."""

from __future__ import annotations

import torch
from torch import nn

from pluribus.inputs import Input
from pluribus.models import build
from pluribus.models.attention import Block
from pluribus.models.cost import counting, multiply_adds


def test_a_perceptron_multiplies_each_weight_once() -> None:
    assert multiply_adds(build("mlp-64", shape=(1, 8, 8), classes=10), (1, 8, 8)) == 64 * 64 + 64 * 10


def test_a_convolution_multiplies_each_weight_once_per_pixel() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),  # 8 x 8 pixels, 4 channels, 1 x 3 x 3 weights each
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),  # 4 x 4 pixels
        nn.Conv2d(6, 6, 3, padding=1, groups=6),  # one channel sees one channel
        nn.Flatten(),
        nn.Linear(96, 10),
    )
    assert multiply_adds(net, (1, 8, 8)) == 64 * 4 * 9 + 16 * 6 * 4 * 9 + 16 * 6 * 9 + 96 * 10


def test_attention_multiplies_each_pair_of_tokens() -> None:
    """Eight tokens of width 16: three projections and one, two products of 8 x 8 x 16, and two layers of 16 x 32."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.block(x)).mean(1)

    assert multiply_adds(Net(), Input("tensor", (8, 16))) == 8 * 16 * 16 * 4 + 2 * 8 * 8 * 16 + 2 * 8 * 16 * 32


def test_attention_of_torch_is_counted_in_eval_mode_too() -> None:
    """Four tokens of width 8, as above; torch would use one kernel for the whole layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.layer(x)).mean(1)

    expected = 4 * 8 * 8 * 4 + 2 * 4 * 4 * 8 + 2 * 4 * 8 * 16
    assert multiply_adds(Net().train(), Input("tensor", (4, 8))) == expected
    assert multiply_adds(Net().eval(), Input("tensor", (4, 8))) == expected


def test_recurrent_layers_multiply_each_weight_once_per_step() -> None:
    """Seven steps of four gates, which see 3 inputs and 5 hidden numbers."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 5, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.lstm(x)[0][:, -1])

    assert multiply_adds(Net(), Input("tensor", (7, 3))) == 7 * 4 * 5 * (3 + 5)


def test_half_of_the_width_is_a_quarter_of_the_inner_products() -> None:
    """64 x 64 + 64 x 10 becomes 64 x 32 + 32 x 10 for a perceptron of one layer; 128 x 64 inside becomes 64 x 32."""
    assert multiply_adds(build("mlp-64@0.5", shape=(1, 8, 8), classes=10), (1, 8, 8)) == 64 * 32 + 32 * 10
    whole = multiply_adds(build("mlp-128-64", shape=(1, 8, 8), classes=10), (1, 8, 8))
    half = multiply_adds(build("mlp-128-64@0.5", shape=(1, 8, 8), classes=10), (1, 8, 8))
    assert (whole, half) == (64 * 128 + 128 * 64 + 64 * 10, 64 * 64 + 64 * 32 + 32 * 10)


def test_the_backward_pass_counts_too() -> None:
    """Gradients of both weights, and of the input of the second layer; nobody needs that of the first."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with counting() as count:
        net(torch.ones(5, 3)).sum().backward()
    assert count.multiply_adds == 5 * (12 + 8) + 5 * (12 + 8) + 5 * 8

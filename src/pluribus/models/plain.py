"""Plain stacks of layers: perceptrons and small convolutional networks, some from tables of papers."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from pluribus.models.probe import Shape, output_width
from pluribus.models.zoo import Builder, register_model


def _stack(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def _add_hidden(body: nn.Sequential, shape: Shape, hidden: tuple[int, ...]) -> nn.Sequential:
    """Add fully connected layers with ReLU to `body`. The first one fits the output of `body` for this image shape."""
    before = output_width(body, shape)
    for number, width in enumerate(hidden, 1):
        body.add_module(f"fc{number}", nn.Linear(before, width))
        body.add_module(f"fc{number}_relu", nn.ReLU())
        before = width
    return body


def _perceptron(*hidden: int) -> Builder:
    return lambda shape: _add_hidden(_stack(flatten=nn.Flatten()), shape, hidden)


def _conv5(first: int, second: int, *, hidden: tuple[int, ...]) -> Builder:
    """Two 5x5 convolutions without padding, each with ReLU and 2x2 max pooling, then the hidden layers."""

    def backbone(shape: Shape) -> nn.Module:
        body = _stack(
            conv1=nn.Conv2d(shape[0], first, 5),
            conv1_relu=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(first, second, 5),
            conv2_relu=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
        )
        return _add_hidden(body, shape, hidden)

    return backbone


register_model("mlp-64", "one hidden layer of 64; for small images")(_perceptron(64))
register_model("mlp-128-64", "hidden layers of 128 and 64; for small images")(_perceptron(128, 64))


@register_model("cnn-16", "one 3x3 convolution of 16, FC 64; for small images")
def _cnn_16(shape: Shape) -> nn.Module:
    body = _stack(
        conv1=nn.Conv2d(shape[0], 16, 3, padding=1),
        conv1_relu=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
    )
    return _add_hidden(body, shape, (64,))


@register_model("cnn-16-32", "two 3x3 convolutions of 16 and 32 with batch norm, FC 64; for small images")
def _cnn_16_32(shape: Shape) -> nn.Module:
    body = _stack(
        conv1=nn.Conv2d(shape[0], 16, 3, padding=1),
        conv1_norm=nn.BatchNorm2d(16),
        conv1_relu=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        conv2_norm=nn.BatchNorm2d(32),
        conv2_relu=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
    )
    return _add_hidden(body, shape, (64,))


@register_model("lenet", "Caffe's LeNet, convolutions of 20 and 50, FC 500")
def _lenet(shape: Shape) -> nn.Module:
    """FedH2L says only "LeNet". Of the usual versions, this one fits its bandwidth claim. One ReLU, after fc1."""
    body = _stack(
        conv1=nn.Conv2d(shape[0], 20, 5),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(20, 50, 5),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
    )
    return _add_hidden(body, shape, (500,))


register_model("cnn4", "the 4-layer CNN of the HtFE groups, FC 512")(_conv5(32, 64, hidden=(512,)))
register_model("fedfree-cnn", "FedFree's client and global CNN, FC 1500-500")(_conv5(32, 64, hidden=(1500, 500)))

# FedGH, Table 2, by its layers. The printed sizes agree (10.00, 6.92, 5.04, 2.55 MB at 3x32x32 and 10 classes), except
# CNN-4's: its layers have 4.04 MB, the table says 3.81.
register_model("fedgh-cnn1", "FedGH Table 2, CNN-1, FC 2000-500")(_conv5(16, 32, hidden=(2000, 500)))
register_model("fedgh-cnn2", "FedGH Table 2, CNN-2, FC 2000-500, fewer filters")(_conv5(16, 16, hidden=(2000, 500)))
register_model("fedgh-cnn3", "FedGH Table 2, CNN-3, FC 1000-500")(_conv5(16, 32, hidden=(1000, 500)))
register_model("fedgh-cnn4", "FedGH Table 2, CNN-4, FC 800-500")(_conv5(16, 32, hidden=(800, 500)))
register_model("fedgh-cnn5", "FedGH Table 2, CNN-5, FC 500-500")(_conv5(16, 32, hidden=(500, 500)))

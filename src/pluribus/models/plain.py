"""Plain stacks of layers: perceptrons and small convolutional networks, some from tables of papers."""

from __future__ import annotations

from torch import nn

from pluribus.inputs import Kind
from pluribus.models.probe import Shape, output_width
from pluribus.models.zoo import Builder, register_model

FLAT: tuple[Kind, ...] = ("image", "signal", "table", "tensor")  # what a perceptron takes


def _stack(
    *filters: int, hidden: tuple[int, ...], kernel: int = 5, padding: int = 0, norm: bool = False, relu: bool = True
) -> Builder:
    """Convolutions with these numbers of filters, each followed by 2x2 max pooling, then the hidden layers with ReLU.

    `norm` and `relu` say whether batch normalization and ReLU follow each convolution.
    """

    flat: dict[Shape, int] = {}  # numbers after the convolutions, measured once per shape

    def backbone(shape: Shape) -> nn.Module:
        body, before = nn.Sequential(), shape[0]
        for number, width in enumerate(filters, 1):
            body.add_module(f"conv{number}", nn.Conv2d(before, width, kernel, padding=padding))
            if norm:
                body.add_module(f"conv{number}_norm", nn.BatchNorm2d(width))
            if relu:
                body.add_module(f"conv{number}_relu", nn.ReLU())
            body.add_module(f"pool{number}", nn.MaxPool2d(2))
            before = width
        body.add_module("flatten", nn.Flatten())
        if shape not in flat:
            flat[shape] = output_width(body, shape)
        before = flat[shape]
        for number, width in enumerate(hidden, 1):
            body.add_module(f"fc{number}", nn.Linear(before, width))
            body.add_module(f"fc{number}_relu", nn.ReLU())
            before = width
        return body

    return backbone


register_model("mlp-64", "one hidden layer of 64; for small images", takes=FLAT)(_stack(hidden=(64,)))
register_model("mlp-128-64", "hidden layers of 128 and 64; for small images", takes=FLAT)(_stack(hidden=(128, 64)))
register_model("cnn-16", "one 3x3 convolution of 16, FC 64; for small images")(
    _stack(16, kernel=3, padding=1, hidden=(64,))
)
register_model("cnn-16-32", "two 3x3 convolutions of 16 and 32 with batch norm, FC 64; for small images")(
    _stack(16, 32, kernel=3, padding=1, norm=True, hidden=(64,))
)
# FedH2L says only "LeNet". Of the usual versions, this one fits its bandwidth claim. One ReLU, after fc1.
register_model("lenet", "Caffe's LeNet, convolutions of 20 and 50, FC 500")(_stack(20, 50, relu=False, hidden=(500,)))
register_model("cnn4", "the 4-layer CNN of the HtFE groups, FC 512")(_stack(32, 64, hidden=(512,)))
register_model("fedfree-cnn", "FedFree's client and global CNN, FC 1500-500")(_stack(32, 64, hidden=(1500, 500)))

# FedGH, Table 2, by its layers. The printed sizes agree (10.00, 6.92, 5.04, 2.55 MB at 3x32x32 and 10 classes), except
# CNN-4's: its layers have 4.04 MB, the table says 3.81.
register_model("fedgh-cnn1", "FedGH Table 2, CNN-1, FC 2000-500")(_stack(16, 32, hidden=(2000, 500)))
register_model("fedgh-cnn2", "FedGH Table 2, CNN-2, FC 2000-500, fewer filters")(_stack(16, 16, hidden=(2000, 500)))
register_model("fedgh-cnn3", "FedGH Table 2, CNN-3, FC 1000-500")(_stack(16, 32, hidden=(1000, 500)))
register_model("fedgh-cnn4", "FedGH Table 2, CNN-4, FC 800-500")(_stack(16, 32, hidden=(800, 500)))
register_model("fedgh-cnn5", "FedGH Table 2, CNN-5, FC 500-500")(_stack(16, 32, hidden=(500, 500)))

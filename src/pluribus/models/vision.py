"""The convolutional networks of torchvision, without weights and without their last layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from pluribus.models.color import takes_gray
from pluribus.models.pretrained import IMAGENET_MEAN, IMAGENET_STD, Origin
from pluribus.models.probe import Shape
from pluribus.models.zoo import Builder, register_model


def _models() -> Any:
    """torchvision.models, imported only when a model is built."""
    from pluribus.internal.torchvision import torchvision

    return torchvision.models


def _without_last(name: str, **arguments: bool) -> Builder:
    """Remove only the layer of the logits. Dropout and hidden layers before it belong to the features."""

    def backbone(shape: Shape) -> nn.Module:
        net = getattr(_models(), name)(weights=None, **arguments)
        if hasattr(net, "fc"):
            net.fc = nn.Identity()
        else:
            net.classifier[-1] = nn.Identity()
        return takes_gray(net, shape)

    return backbone


def _short_resnet(stages: int) -> Builder:
    """One basic block in each stage, and only the first `stages` of four: 64, 128, 256 or 512 features."""

    def backbone(shape: Shape) -> nn.Module:
        resnet = _models().resnet
        net = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
        for unused in range(stages + 1, 5):
            setattr(net, f"layer{unused}", nn.Identity())
        net.fc = nn.Identity()
        return takes_gray(net, shape)

    return backbone


def _register(name: str, about: str, source: str) -> None:
    origin = Origin("torchvision", source, IMAGENET_MEAN, IMAGENET_STD)
    register_model(name, f"torchvision's {about}", origin=origin)(_without_last(source))


register_model("resnet4", "ResNet of one stage with one block")(_short_resnet(1))
register_model("resnet6", "ResNet of two stages with one block each")(_short_resnet(2))
register_model("resnet8", "ResNet of three stages with one block each")(_short_resnet(3))
register_model("resnet10", "ResNet of four stages with one block each")(_short_resnet(4))
for _depth in (18, 34, 50, 101, 152):
    _register(f"resnet{_depth}", f"ResNet-{_depth}", f"resnet{_depth}")
register_model(
    "googlenet",
    "torchvision's GoogLeNet without auxiliary classifiers; dropout 0.2 on the features",
    origin=Origin("torchvision", "googlenet"),  # its weights came from TensorFlow and expect pixels in [-1, 1]
)(_without_last("googlenet", aux_logits=False, init_weights=True))  # True is the default, but it warns if not given
_register("mobilenet-v2", "MobileNetV2; dropout 0.2 on the features", "mobilenet_v2")
_register("alexnet", "AlexNet with its two hidden layers of 4096", "alexnet")
_register("vgg11", "VGG-11 with its two hidden layers of 4096", "vgg11")

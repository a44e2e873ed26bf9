"""The convolutional networks of torchvision, without weights and without their last layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from pluribus.models.colour import takes_grey
from pluribus.models.pretrained import IMAGENET_MEAN, IMAGENET_STD, Origin
from pluribus.models.probe import Shape
from pluribus.models.zoo import Builder, register_model


def _models() -> Any:
    """torchvision.models, imported only when a model is built."""
    from pluribus.internal.torchvision import torchvision

    return torchvision.models


def _origin(name: str) -> Origin:
    return Origin("torchvision", name, IMAGENET_MEAN, IMAGENET_STD)


def _resnet(depth: int) -> Builder:
    def backbone(shape: Shape) -> nn.Module:
        net = getattr(_models(), f"resnet{depth}")(weights=None)
        net.fc = nn.Identity()
        return takes_grey(net, shape)

    return backbone


def _short_resnet(stages: int) -> Builder:
    """One basic block in each stage, and only the first `stages` of four: 64, 128, 256 or 512 features."""

    def backbone(shape: Shape) -> nn.Module:
        resnet = _models().resnet
        net = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
        for unused in range(stages + 1, 5):
            setattr(net, f"layer{unused}", nn.Identity())
        net.fc = nn.Identity()
        return takes_grey(net, shape)

    return backbone


register_model("resnet4", "ResNet of one stage with one block")(_short_resnet(1))
register_model("resnet6", "ResNet of two stages with one block each")(_short_resnet(2))
register_model("resnet8", "ResNet of three stages with one block each")(_short_resnet(3))
register_model("resnet10", "ResNet of four stages with one block each")(_short_resnet(4))
register_model("resnet18", "torchvision's ResNet-18", origin=_origin("resnet18"))(_resnet(18))
register_model("resnet34", "torchvision's ResNet-34", origin=_origin("resnet34"))(_resnet(34))
register_model("resnet50", "torchvision's ResNet-50", origin=_origin("resnet50"))(_resnet(50))
register_model("resnet101", "torchvision's ResNet-101", origin=_origin("resnet101"))(_resnet(101))
register_model("resnet152", "torchvision's ResNet-152", origin=_origin("resnet152"))(_resnet(152))


@register_model(
    "googlenet",
    "torchvision's GoogLeNet without auxiliary classifiers; dropout 0.2 on the features",
    origin=Origin("torchvision", "googlenet"),  # its weights came from TensorFlow and expect pixels in [-1, 1]
)
def _googlenet(shape: Shape) -> nn.Module:
    # torchvision warns if init_weights is not given. True is its default, and what the papers used.
    net = _models().googlenet(weights=None, aux_logits=False, init_weights=True)
    net.fc = nn.Identity()
    return takes_grey(net, shape)


@register_model(
    "mobilenet-v2", "torchvision's MobileNetV2; dropout 0.2 on the features", origin=_origin("mobilenet_v2")
)
def _mobilenet_v2(shape: Shape) -> nn.Module:
    return takes_grey(_remove_last(_models().mobilenet_v2(weights=None)), shape)


@register_model("alexnet", "torchvision's AlexNet with its two hidden layers of 4096", origin=_origin("alexnet"))
def _alexnet(shape: Shape) -> nn.Module:
    return takes_grey(_remove_last(_models().alexnet(weights=None)), shape)


@register_model("vgg11", "torchvision's VGG-11 with its two hidden layers of 4096", origin=_origin("vgg11"))
def _vgg11(shape: Shape) -> nn.Module:
    return takes_grey(_remove_last(_models().vgg11(weights=None)), shape)


def _remove_last(net: Any) -> nn.Module:
    """Remove only the layer of the logits. Dropout and hidden layers before it belong to the features."""
    net.classifier[-1] = nn.Identity()
    module: nn.Module = net
    return module

"""timm's vision transformers; the feature vector is the class token."""

from __future__ import annotations

from torch import nn

from pluribus.internal.late import import_late
from pluribus.models.color import takes_gray
from pluribus.models.pretrained import Origin
from pluribus.models.probe import Shape
from pluribus.models.zoo import Builder, HeadKind, register_model


def _vit(name: str, patch: int) -> Builder:
    def backbone(shape: Shape) -> nn.Module:
        _, height, width = shape
        if height % patch or width % patch:
            raise RuntimeError(f"its patches of {patch}x{patch} do not tile the images")
        net = import_late("timm").create_model(name, pretrained=False, img_size=(height, width), num_classes=0)
        return takes_gray(net, shape)

    return backbone


def _register(name: str, about: str, size: str, patch: int, head: HeadKind = "linear") -> None:
    # timm's own choice of weights for these names: ImageNet-21k, fine-tuned on ImageNet-1k, for pixels in [-1, 1]
    origin = Origin("timm", f"vit_{size}_patch{patch}_224")
    register_model(name, about, head=head, origin=origin)(_vit(origin.name, patch))


_register("vit-s16", "timm's ViT-S/16", "small", 16)
_register("vit-b16", "timm's ViT-B/16", "base", 16)
_register("vit-b32", "timm's ViT-B/32", "base", 32)
_register("vit-l16", "timm's ViT-L/16", "large", 16)
# HtM10's transformers have a head of two layers, so a method that shares heads cannot mix them with the others.
_register("vit-b16-mlp", "ViT-B/16 with the two-layer head of HtM10", "base", 16, "mlp")
_register("vit-b32-mlp", "ViT-B/32 with the two-layer head of HtM10", "base", 32, "mlp")

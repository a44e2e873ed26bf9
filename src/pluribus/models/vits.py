"""timm's vision transformers; the feature vector is the class token."""

from __future__ import annotations

from torch import nn

from pluribus.models.colour import takes_grey
from pluribus.models.probe import Shape
from pluribus.models.zoo import Builder, register_model


def _vit(size: str, patch: int) -> Builder:
    def backbone(shape: Shape) -> nn.Module:
        _, height, width = shape
        if height % patch or width % patch:
            raise RuntimeError(f"its patches of {patch}x{patch} do not tile them")
        from pluribus.models import _torchvision  # noqa: F401  timm imports torchvision, which may need its cure

        import timm  # isort: skip

        name = f"vit_{size}_patch{patch}_224"
        net = timm.create_model(name, pretrained=False, img_size=(height, width), num_classes=0)
        return takes_grey(net, shape)

    return backbone


register_model("vit-s16", "timm's ViT-S/16")(_vit("small", 16))
register_model("vit-b16", "timm's ViT-B/16")(_vit("base", 16))
register_model("vit-b32", "timm's ViT-B/32")(_vit("base", 32))
register_model("vit-l16", "timm's ViT-L/16")(_vit("large", 16))
# HtM10's transformers carry a head of two layers, so a method that shares heads cannot mix them with the others.
register_model("vit-b16-mlp", "ViT-B/16 with the two-layer head of HtM10", head="mlp")(_vit("base", 16))
register_model("vit-b32-mlp", "ViT-B/32 with the two-layer head of HtM10", head="mlp")(_vit("base", 32))

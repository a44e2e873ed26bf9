"""Three small pretrained backbones of different width for 16x16 gray images, shipped with the package.

They were trained on letters (`scripts/pretrain_tiny.py`), never on digits, so that methods for frozen pretrained
backbones run on the embedded data without a download.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.models import attention
from pluribus.models.attention import HEADS
from pluribus.models.pretrained import Origin
from pluribus.models.probe import Shape, shape_text
from pluribus.models.zoo import Builder, register_model

SHAPE: Shape = (1, 16, 16)
PATCH, DEPTH = 4, 4


class Block(attention.Block):
    """A transformer block with torch's own kernel for attention."""

    def _attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)


class TinyViT(nn.Module):
    """A vision transformer whose parts have timm's names, so that prompts work with both."""

    num_prefix_tokens = 1  # the class token
    global_pool = "token"

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.embed_dim = width
        self.patch_embed = nn.Sequential(
            OrderedDict(proj=nn.Conv2d(SHAPE[0], width, PATCH, PATCH), flatten=nn.Flatten(2))
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        positions = torch.empty(1, 1 + (side // PATCH) ** 2, width)
        self.pos_embed = nn.Parameter(positions.normal_().mul_(0.02))  # in place, because of `meta.py`
        self.patch_drop, self.norm_pre = nn.Identity(), nn.Identity()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(width)

    def _pos_embed(self, patches: Tensor) -> Tensor:
        patches = patches.transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1) + self.pos_embed

    def forward_head(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.norm(self.blocks(self._pos_embed(self.patch_embed(x)))))


def _vit(width: int) -> Builder:
    def backbone(shape: Shape) -> nn.Module:
        _require_gray(shape)
        if shape != SHAPE:
            raise RuntimeError(f"it was pretrained on {shape_text(SHAPE)} images (--image-size 16)")
        return TinyViT(width, shape[1])

    return backbone


def _require_gray(shape: Shape) -> None:
    if shape[0] != SHAPE[0]:
        raise RuntimeError("it was pretrained on gray images")


def _cnn(shape: Shape) -> nn.Module:
    _require_gray(shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    before = shape[0]
    for number, width in enumerate((16, 32, 64, 64), 1):
        layers[f"conv{number}"] = nn.Conv2d(before, width, 3, padding=1, bias=False)
        layers[f"conv{number}_norm"] = nn.BatchNorm2d(width)
        layers[f"conv{number}_relu"] = nn.ReLU()
        if number in (1, 2):
            layers[f"pool{number}"] = nn.MaxPool2d(2)
        before = width
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    return nn.Sequential(layers)


for _name, _about, _builder in (
    ("tiny-vit-32", "transformer of width 32, pretrained on letters; 16x16 gray images", _vit(32)),
    ("tiny-vit-48", "transformer of width 48, pretrained on letters; 16x16 gray images", _vit(48)),
    ("tiny-cnn-64", "four convolutions with batch norm, width 64, pretrained on letters; gray images", _cnn),
):
    register_model(_name, _about, origin=Origin("package", _name))(_builder)

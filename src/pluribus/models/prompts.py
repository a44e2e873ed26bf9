"""Prompts for frozen backbones: tokens for transformers (Jia et al., ECCV 2022), a frame of pixels for all others.

Only the prompts learn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from pluribus.errors import MismatchError
from pluribus.models.frozen import Frozen
from pluribus.models.pretrained import layers_before
from pluribus.models.probe import Shape, output_width
from pluribus.models.two_part import TwoPartModel

Style = Literal["deep", "shallow"]


class Prompted(Frozen):
    """A frozen backbone with prompts."""

    def prompts(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters(recurse=False))

    def draw(self, generator: torch.Generator) -> Self:
        raise NotImplementedError

    def _uniform(self, low: float, high: float, generator: torch.Generator) -> Self:
        with torch.no_grad():
            for prompt in self.prompts().values():
                prompt.copy_(torch.rand(prompt.shape, generator=generator) * (high - low) + low)
        return self


class PromptedTransformer(Prompted):
    """`number` learnable tokens between class token and patches, before the first block or before every block.

    deep: prompts (N, n, d). The output of a block for its prompts is dropped, and the next block has its own.
    shallow: prompts (n, d). The output of a block for the prompts is the input of the next block.
    """

    def __init__(self, net: nn.Module, style: Style, number: int) -> None:
        super().__init__(net)
        self.style, self.number = style, number
        _, vit = layers_before(net)
        blocks = (len(vit.blocks),) if style == "deep" else ()
        self.tokens = nn.Parameter(torch.zeros(*blocks, number, vit.embed_dim))

    def draw(self, generator: torch.Generator) -> Self:
        """U(-v, v) with v = sqrt(6 / (c patch^2 + d)), as for a layer from patches to tokens."""
        _, vit = layers_before(self.net)
        bound = math.sqrt(6 / (vit.patch_embed.proj.weight[0].numel() + vit.embed_dim))
        return self._uniform(-bound, bound, generator)

    def forward(self, x: Tensor) -> Tensor:
        """The class token after the last block."""
        before, vit = layers_before(self.net)
        for layer in before:
            x = layer(x)
        x = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x))))
        first, rest = x[:, : vit.num_prefix_tokens], x[:, vit.num_prefix_tokens :]
        for number, block in enumerate(vit.blocks):
            if self.style == "deep" or number == 0:  # Eq. 3 and 5; otherwise Eq. 4
                tokens = self.tokens[number] if self.style == "deep" else self.tokens
                x = torch.cat([first, tokens.expand(len(x), -1, -1), rest], 1)
            x = block(x)
            first, rest = x[:, : vit.num_prefix_tokens], x[:, vit.num_prefix_tokens + self.number :]
        features: Tensor = vit.forward_head(vit.norm(x))
        return features


class PaddedImage(Prompted):
    """A learnable frame of p pixels around every image, so that R x R becomes (R + 2p) x (R + 2p).

    prompt_lr (c, R, 2p) is left and right of the image, prompt_tb (c, 2p, R + 2p) above and below. They start as pixels
    in [0, 1], and are normalized like the image.
    """

    def __init__(self, net: nn.Module, shape: Shape, padding: int) -> None:
        super().__init__(net)
        channels, height, width = shape
        self.prompt_lr = nn.Parameter(torch.zeros(channels, height, 2 * padding))
        self.prompt_tb = nn.Parameter(torch.zeros(channels, 2 * padding, width + 2 * padding))

    def draw(self, generator: torch.Generator) -> Self:
        return self._uniform(0.0, 1.0, generator)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self._pixels(self.prompt_lr, len(x)).chunk(2, -1)
        top, bottom = self._pixels(self.prompt_tb, len(x)).chunk(2, -2)
        features: Tensor = self.net(torch.cat([top, torch.cat([left, x, right], -1), bottom], -2))
        return features

    def _pixels(self, prompt: Tensor, batch: int) -> Tensor:
        """Convert pixels from [0, 1] to [-1, 1], the range of images."""
        return (2 * prompt - 1).expand(batch, -1, -1, -1)


@dataclass(frozen=True)
class Prompting:
    """The prompts of a backbone: style and number of tokens for a transformer, padding of images for all others."""

    style: Style
    number: int
    padding: int

    def attach(self, model: TwoPartModel, shape: Shape) -> Prompted:
        """Freeze the backbone of a model and add prompts to it. They are zero until `draw`."""
        backbone = model.get_submodule("features.backbone")
        frozen: Prompted = PaddedImage(backbone, shape, self.padding)
        if is_transformer(backbone):
            frozen = PromptedTransformer(backbone, self.style, self.number)
        model.features.backbone = frozen
        return frozen

    def skeleton(self, model: TwoPartModel, shape: Shape, name: str) -> TwoPartModel:
        """Add prompts to a model on the meta device. MismatchError: it cannot have prompts."""
        try:
            with torch.device("meta"):
                self.attach(model, shape)
            output_width(model, shape)
        except (RuntimeError, AttributeError) as error:  # wrong image size, or no separate backbone
            raise MismatchError(
                f"model '{name}' cannot have prompts: it must be a transformer with a class token, or a backbone that "
                f"takes images of any size. Use other --models."
            ) from error
        return model


def prompting_of(model: nn.Module) -> Prompting | None:
    """The prompts that were attached to a model; None if it has none."""
    match getattr(getattr(model, "features", None), "backbone", None):
        case PromptedTransformer(style=style, number=number):
            return Prompting(style, number, padding=0)
        case PaddedImage(prompt_tb=frame):
            return Prompting("deep", number=0, padding=frame.shape[1] // 2)
    return None


def is_transformer(backbone: nn.Module) -> bool:
    """Whether a backbone is a vision transformer with a class token, judged by timm's names for its parts."""
    _, net = layers_before(backbone)
    parts = ("patch_embed", "_pos_embed", "patch_drop", "norm_pre", "blocks", "norm", "forward_head", "embed_dim")
    return all(hasattr(net, part) for part in parts) and getattr(net, "global_pool", None) == "token"


def prompts_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The prompts of a model by name, not copied."""
    backbone = model.get_submodule("features.backbone")
    assert isinstance(backbone, Prompted)
    return backbone.prompts()

"""Prompts for frozen backbones: tokens for transformers (Jia et al., ECCV 2022), a frame of pixels for all others.

Only the prompts learn. The backbone is in eval mode whatever the model around it is told, batch-norm statistics
included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from pluribus.errors import MismatchError
from pluribus.models.pretrained import layers_before
from pluribus.models.probe import Shape, output_width
from pluribus.models.two_part import TwoPartModel

Style = Literal["deep", "shallow"]


class Frozen(nn.Module):
    """A backbone, `net`, that never changes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        """Everything but the backbone."""
        super().train(mode)
        self.net.eval()
        return self

    def prompts(self) -> dict[str, nn.Parameter]:
        """What learns, by name."""
        return dict(self.named_parameters(recurse=False))

    def draw(self, generator: torch.Generator) -> Self:
        """Initial prompts."""
        raise NotImplementedError

    def _uniform(self, low: float, high: float, generator: torch.Generator) -> Self:
        with torch.no_grad():
            for prompt in self.prompts().values():
                prompt.copy_(torch.rand(prompt.shape, generator=generator) * (high - low) + low)
        return self


class PromptedTransformer(Frozen):
    """`number` learnable tokens between class token and patches, before the first block or before every block.

    deep: prompts (N, n, d); what a block makes of its prompts is dropped, the next block gets its own.
    shallow: prompts (n, d); what becomes of them flows on.
    """

    def __init__(self, net: nn.Module, style: Style, number: int) -> None:
        super().__init__(net)
        self.style, self.number = style, number
        _, vit = _parts(net)
        blocks = (len(vit.blocks),) if style == "deep" else ()
        self.tokens = nn.Parameter(torch.zeros(*blocks, number, vit.embed_dim))

    def draw(self, generator: torch.Generator) -> Self:
        """U(-v, v) with v = sqrt(6 / (c patch^2 + d)), as for a layer from patches to tokens."""
        _, vit = _parts(self.net)
        bound = math.sqrt(6 / (vit.patch_embed.proj.weight[0].numel() + vit.embed_dim))
        return self._uniform(-bound, bound, generator)

    def forward(self, x: Tensor) -> Tensor:
        """The class token after the last block."""
        before, vit = _parts(self.net)
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


class PaddedImage(Frozen):
    """A learnable frame of p pixels around every image, so that R x R becomes (R + 2p) x (R + 2p).

    prompt_lr (c, R, 2p) stands left and right, prompt_tb (c, 2p, R + 2p) above and below. They are pixels in [0, 1] at
    first, and go through the same normalisation as the image.
    """

    def __init__(self, net: nn.Module, shape: Shape, padding: int) -> None:
        super().__init__(net)
        channels, height, width = shape
        self.prompt_lr = nn.Parameter(torch.zeros(channels, height, 2 * padding))
        self.prompt_tb = nn.Parameter(torch.zeros(channels, 2 * padding, width + 2 * padding))

    def draw(self, generator: torch.Generator) -> Self:
        """U(0, 1)."""
        return self._uniform(0.0, 1.0, generator)

    def forward(self, x: Tensor) -> Tensor:
        """What the backbone makes of the framed images."""
        left, right = self._pixels(self.prompt_lr, len(x)).chunk(2, -1)
        top, bottom = self._pixels(self.prompt_tb, len(x)).chunk(2, -2)
        framed = torch.cat([top, torch.cat([left, x, right], -1), bottom], -2)
        features: Tensor = self.net(framed)
        return features

    def _pixels(self, prompt: Tensor, batch: int) -> Tensor:
        """From [0, 1] to the [-1, 1] in which images are taken."""
        return (2 * prompt - 1).expand(batch, -1, -1, -1)


@dataclass(frozen=True)
class Prompting:
    """Which prompts a backbone gets: style and number of a transformer's tokens, padding of all others' images."""

    style: Style
    number: int
    padding: int

    def attach(self, model: TwoPartModel, shape: Shape) -> Frozen:
        """Freeze the backbone of a model and put prompts before it; they are zero until they are drawn."""
        backbone = model.get_submodule("features.backbone")
        frozen: Frozen = PaddedImage(backbone, shape, self.padding)
        if is_transformer(backbone):
            frozen = PromptedTransformer(backbone, self.style, self.number)
        model.features.backbone = frozen
        return frozen

    def skeleton(self, model: TwoPartModel, shape: Shape, name: str) -> TwoPartModel:
        """A model on the meta device with its prompts; MismatchError if it can have none."""
        try:
            with torch.device("meta"):
                self.attach(model, shape)
            output_width(model, shape)
        except (RuntimeError, AttributeError) as error:  # images of another size; no backbone of its own
            raise MismatchError(
                f"there are no prompts for '{name}': it must be a transformer with a class token, or a backbone that "
                f"takes images of any size. Use other --models."
            ) from error
        return model


def is_transformer(backbone: nn.Module) -> bool:
    """Whether a backbone is a vision transformer with a class token, by timm's names for its parts."""
    _, net = _parts(backbone)
    parts = ("patch_embed", "_pos_embed", "patch_drop", "norm_pre", "blocks", "norm", "forward_head", "embed_dim")
    return all(hasattr(net, part) for part in parts) and getattr(net, "global_pool", None) == "token"


def prompts_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The prompts of a model, live, by name."""
    backbone = model.get_submodule("features.backbone")
    assert isinstance(backbone, Frozen)
    return backbone.prompts()


def _parts(backbone: nn.Module) -> tuple[list[nn.Module], Any]:
    """`layers_before`, for a network whose parts are known by name only."""
    return layers_before(backbone)

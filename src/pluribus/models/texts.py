"""Models for tokens (n, length), where 0 is padding, which changes no output. All have 64 features."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.inputs import PADDING
from pluribus.models.attention import Blocks, masked_mean
from pluribus.models.probe import Shape
from pluribus.models.zoo import Builder, register_model

WIDTH = 64
KERNELS = (3, 4, 5)  # tokens that one output of a convolution sees
SPREAD = 0.3  # of initial word vectors. At torch's 1, words that are rarely seen stay loud noise.
SLOWEST = 10_000.0  # tokens per radian of the slowest wave of positions


class Embedded(nn.Module):
    """Vectors of tokens. Those of padding are zero, whatever the weights are."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        nn.init.normal_(self.embedding.weight, std=SPREAD)

    def embed(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(x)
        return vectors * (x != PADDING)[..., None].to(vectors.dtype)


class FastText(Embedded):
    """The mean of the vectors of tokens, then a linear layer."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(masked_mean(self.embed(x), x != PADDING)))


class TextCNN(Embedded):
    """Convolutions over 3, 4 and 5 tokens, the largest value of each filter, then a linear layer."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, kernel) for kernel in KERNELS)
        self.fc = nn.Linear(len(KERNELS) * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        vectors, seen = self.embed(x).transpose(1, 2), (x != PADDING)[:, None]
        found = []
        for kernel, conv in zip(KERNELS, self.convs, strict=True):
            # Zeros around the row, as padding: a row shorter than the kernel has an output too, and more padding
            # changes nothing. Outputs at padding count as 0, the least value after ReLU.
            around = F.pad(vectors, ((kernel - 1) // 2, kernel // 2))
            found.append((F.relu(conv(around)) * seen.to(vectors.dtype)).amax(2))
        return F.relu(self.fc(torch.cat(found, 1)))


class Recurrent(Embedded):
    """A recurrent layer. The features are its state at the last token."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU], vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.layer = layer(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return _state_at_last(self.layer, self.embed(x), x)


class BiLSTM(Embedded):
    """An LSTM in each direction. The features are a linear layer of the two last states."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(vocabulary)
        self.ahead = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.back = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.fc = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # Not a bidirectional layer: it would start at the padding.
        turned = _reverse(x)
        ahead, back = (
            _state_at_last(self.ahead, self.embed(x), x),
            _state_at_last(self.back, self.embed(turned), turned),
        )
        return F.relu(self.fc(torch.cat([ahead, back], 1)))


def _last(x: Tensor) -> Tensor:
    """The position of the last token of each row, (n, 1)."""
    return (x != PADDING).sum(1, keepdim=True) - 1


def _reverse(x: Tensor) -> Tensor:
    """The tokens in reverse order. Padding stays at the end."""
    at = _last(x) - torch.arange(x.shape[1], device=x.device)
    return torch.where(at >= 0, x.gather(1, at.clamp(min=0)), PADDING)


def _state_at_last(layer: nn.Module, vectors: Tensor, x: Tensor) -> Tensor:
    states: Tensor = layer(vectors)[0]
    # a sum with one term, not `gather`: its gradient on a GPU would need atomic additions
    is_last = torch.arange(x.shape[1], device=x.device) == _last(x)
    return (states * is_last[..., None].to(states.dtype)).sum(1)


class Transformer(Embedded):
    """Transformer blocks over tokens with positions as waves. The features are the mean over tokens."""

    positions: Tensor

    def __init__(self, vocabulary: int, length: int, depth: int) -> None:
        super().__init__(vocabulary)
        self.layers = Blocks(WIDTH, depth)
        positions = torch.empty(length, WIDTH).copy_(_waves(length))  # constants
        self.register_buffer("positions", positions, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = x != PADDING
        return masked_mean(self.layers(self.embed(x) + self.positions, mask), mask)


def _waves(length: int) -> Tensor:
    """Sines and cosines of positions, (length, width), from one radian per token to the slowest wave.

    These are numbers even in a model on the meta device, where arithmetic would make torch import its compiler.
    """
    with torch.device("cpu"):
        speeds = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(SLOWEST) / WIDTH))
        angles = torch.arange(length)[:, None] * speeds
        return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


def _transformer(depth: int) -> Builder:
    def backbone(shape: Shape, vocabulary: int) -> nn.Module:
        return Transformer(vocabulary, shape[0], depth)

    return backbone


def _register(name: str, about: str, builder: Builder) -> None:
    register_model(name, about, takes="tokens")(builder)


_register("fasttext", "mean of word vectors of 64, FC 64", lambda shape, vocabulary: FastText(vocabulary))
_register("textcnn", "convolutions of 3, 4 and 5 tokens, FC 64", lambda shape, vocabulary: TextCNN(vocabulary))
_register("textlstm", "LSTM of width 64, last state", lambda shape, vocabulary: Recurrent(nn.LSTM, vocabulary))
_register("textbilstm", "an LSTM of width 64 per direction, FC 64", lambda shape, vocabulary: BiLSTM(vocabulary))
_register("textgru", "GRU of width 64, last state", lambda shape, vocabulary: Recurrent(nn.GRU, vocabulary))
_register("texttransformer-1", "one transformer block of width 64, mean of tokens", _transformer(1))
_register("texttransformer-2", "two transformer blocks of width 64, mean of tokens", _transformer(2))
_register("texttransformer-4", "four transformer blocks of width 64, mean of tokens", _transformer(4))

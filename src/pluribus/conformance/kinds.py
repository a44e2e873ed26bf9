"""Small data of every kind, and small models for it. Their dotted paths are values of settings.

All of it is made from real digits, so that there is something to learn: read as signals, as tokens, as a table, as
tensors, and with numbers or several labels to predict.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pluribus.conformance.digits import few
from pluribus.data import Dataset
from pluribus.draws import seeded
from pluribus.inputs import PADDING, UNKNOWN, Kind
from pluribus.models.attention import Block
from pluribus.targets import TargetKind

ROWS = 120
INK = 128  # a pixel of at least this many of 255 is a token
HELD = 30  # rows of a natural client, one after the other
GROUP = 3  # rows of one recording
WIDTH = 16  # of the features of all clients
HERE = __name__
STAGED = {"signal": "cnn1d-2", "table": "table-mlp-2", "tensor": "mlp-128-64"}  # models with two stages


class Sample(NamedTuple):
    """Data of one kind and with one target, and models for it: two for mixed federations, the first for others."""

    name: str
    kind: Kind
    target: TargetKind
    data: str
    models: tuple[str, str]
    settings: dict[str, Any]

    def settings_for(
        self, same_model: bool, batch_norm: bool = False, depths: bool = False, pretrained: bool = False
    ) -> dict[str, Any]:
        """The settings of an experiment with a method. `batch_norm`: with the first model, and batch norm in it.

        `depths`: with clients of two depths of one model. `pretrained`: with a transformer that counts as pretrained.
        """
        models = self.models[0] if same_model else ",".join(self.models)
        if depths and self.kind in STAGED:
            return {"data": self.data, "models": STAGED[self.kind], "capacity": "2,1", "width": WIDTH, **self.settings}
        if batch_norm:
            models = f"{HERE}.normed_{self.models[0].removeprefix(f'{HERE}.')}"
        if pretrained:
            models = f"{HERE}.attending_{'tokens' if self.kind == 'tokens' else 'numbers'}"
        width = {} if same_model else {"width": WIDTH}
        return {"data": self.data, "models": models, **width, **self.settings}


def _sample(name: str, kind: Kind, target: TargetKind, data: str, models: str, **settings: Any) -> Sample:
    pair = f"{HERE}.{models}", f"{HERE}.wide_{models}"
    return Sample(name, kind, target, f"{HERE}.{data}", pair, settings)


# ---- data ------------------------------------------------------------------------------------------------------------


def few_signals() -> Dataset:
    """The rows of a digit as 8 signals of length 8, held by 4 natural clients, in recordings of 3 windows each."""
    x, y, classes = _digits()
    at = torch.arange(ROWS)
    who = {"client": at // HELD, "clients": ("ann", "ben", "cem", "dan"), "group": at // GROUP, "time": at.double()}
    return Dataset("few-signals", x.half(), y, classes, kind="signal", **who)  # type: ignore[arg-type]


def few_tokens() -> Dataset:
    """The number of every dark pixel is a token: rows of different lengths."""
    x, y, classes = _digits()
    rows = [(one.flatten() >= INK).nonzero().flatten() + UNKNOWN + 1 for one in x]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING).to(torch.int32)
    return Dataset("few-tokens", ids, y, classes, kind="tokens", vocabulary=x[0].numel() + UNKNOWN + 1)


def few_table() -> Dataset:
    """Ten pixels, and in which quarter the digit is darkest: a category."""
    x, y, classes = _digits()
    pixels = torch.cat([x[:, 2, 1:6], x[:, 5, 1:6]], 1)
    quarters = x.unfold(1, 4, 4).unfold(2, 4, 4).sum((3, 4)).flatten(1).argmax(1)
    table = torch.cat([pixels, quarters[:, None].float()], 1)
    names = (*(f"pixel{number}" for number in range(10)), "quarter")
    values = (("upper left", "upper right", "lower left", "lower right"),)
    return Dataset("few-table", table, y, classes, kind="table", columns=names, categories=values)


def few_tensors() -> Dataset:
    """Means of 2 x 2 pixels, in [-1, 1], as tensors of no kind."""
    x, y, classes = _digits()
    pooled = x.unfold(1, 2, 2).unfold(2, 2, 2).mean((3, 4))
    return Dataset("few-tensors", pooled / 127.5 - 1, y, classes, kind="tensor")


def few_numbers() -> Dataset:
    """The upper half of a digit, from which the mean gray of the lower half and of the right half is predicted."""
    x, _, _ = _digits()
    grays = torch.stack([x[:, 4:].mean((1, 2)), x[:, :, 4:].mean((1, 2))], 1) / 255
    return Dataset("few-numbers", x[:, :4].flatten(1), grays, ("lower", "right"), kind="table")


def few_labels() -> Dataset:
    """All pixels of a digit, and three properties of it that may hold at once."""
    x, y, _ = _digits()
    labels = torch.stack([y % 2 == 0, (y == 0) | (y == 6) | (y == 8) | (y == 9), y > 4], 1).to(torch.uint8)
    return Dataset("few-labels", x.flatten(1), labels, ("even", "has a circle", "above 4"), kind="table")


def _digits() -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Digits (N, 8, 8) of 0 to 255, their classes, and the names of all classes."""
    digits = few()
    return digits.x[:ROWS, 0].float(), digits.y[:ROWS], digits.classes


# ---- models ----------------------------------------------------------------------------------------------------------


def signal_cnn(shape: tuple[int, ...], width: int = 16) -> nn.Module:
    """A convolution over time, and the mean of it over each half of the time."""
    wave = nn.Conv1d(shape[0], width // 2, 3, padding=1)
    return nn.Sequential(wave, nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten())


def wide_signal_cnn(shape: tuple[int, ...]) -> nn.Module:
    """The same with more channels."""
    return signal_cnn(shape, 24)


class TokenMean(nn.Module):
    """The mean of the embeddings of all tokens of a row. Padding does not count."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        present = (x != PADDING).unsqueeze(2).to(self.mix.weight.dtype)
        mean = (self.embedding(x) * present).sum(1) / present.sum(1).clamp(min=1)
        mixed: Tensor = self.mix(mean).relu()
        return mixed


def token_mean(shape: tuple[int, ...], vocabulary: int) -> nn.Module:
    """Sixteen features of the mean of a row's embeddings."""
    return TokenMean(vocabulary, 16)


def wide_token_mean(shape: tuple[int, ...], vocabulary: int) -> nn.Module:
    """The same with more features."""
    return TokenMean(vocabulary, 24)


class TableNet(nn.Module):
    """A perceptron of the numbers of a table and of the embedded values of its categories."""

    def __init__(self, columns: int, categories: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.numbers = columns - len(categories)
        self.embeddings = nn.ModuleList(nn.Embedding(values, 2) for values in categories)
        self.hidden = nn.Linear(self.numbers + 2 * len(categories), width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, : self.numbers]]
        parts += [table(x[:, self.numbers + at].long()) for at, table in enumerate(self.embeddings)]
        hidden: Tensor = self.hidden(torch.cat(parts, 1)).relu()
        return hidden


def table_mlp(shape: tuple[int, ...], categories: tuple[int, ...]) -> nn.Module:
    """Sixteen features of a row of a table."""
    return TableNet(shape[0], categories, 16)


def wide_table_mlp(shape: tuple[int, ...], categories: tuple[int, ...]) -> nn.Module:
    """The same with more features."""
    return TableNet(shape[0], categories, 24)


def tensor_mlp(shape: tuple[int, ...], width: int = 16) -> nn.Module:
    """A perceptron of all numbers of a tensor."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU())


def wide_tensor_mlp(shape: tuple[int, ...]) -> nn.Module:
    """The same with more features."""
    return tensor_mlp(shape, 24)


def normed_signal_cnn(shape: tuple[int, ...]) -> nn.Module:
    """With batch norm."""
    return _normed(signal_cnn(shape))


def normed_token_mean(shape: tuple[int, ...], vocabulary: int) -> nn.Module:
    """With batch norm."""
    return _normed(token_mean(shape, vocabulary))


def normed_table_mlp(shape: tuple[int, ...], categories: tuple[int, ...]) -> nn.Module:
    """With batch norm."""
    return _normed(table_mlp(shape, categories))


def normed_tensor_mlp(shape: tuple[int, ...]) -> nn.Module:
    """With batch norm."""
    return _normed(tensor_mlp(shape))


def _normed(net: nn.Module) -> nn.Module:
    return nn.Sequential(net, nn.BatchNorm1d(WIDTH))


class Attending(nn.Module):
    """A transformer block over the parts of a row: tokens, or the numbers along the last dimension."""

    def __init__(self, embed: nn.Module, parts: int) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Parameter(torch.randn(parts, WIDTH))
        self.block = Block(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.block(self.embed(x) + self.positions).mean(1)
        return mean


def attending_tokens(shape: tuple[int, ...], vocabulary: int) -> nn.Module:
    """A transformer for tokens."""
    return _same_everywhere(lambda: Attending(nn.Embedding(vocabulary, WIDTH), shape[0]))


def attending_numbers(shape: tuple[int, ...]) -> nn.Module:
    """A transformer for rows of numbers. Those of a table are its parts."""
    size = shape[-1] if len(shape) > 1 else 1
    parts = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (-1, size)))
    return _same_everywhere(lambda: Attending(nn.Sequential(parts, nn.Linear(size, WIDTH)), math.prod(shape) // size))


attending_tokens.pretrained = attending_numbers.pretrained = True  # type: ignore[attr-defined]


def _same_everywhere(build: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same weights in every client, as if they were read from a file."""
    with seeded("pretrained"):
        return build()


SAMPLES = (
    _sample("signals", "signal", "classes", "few_signals", "signal_cnn", partition="natural"),
    _sample("tokens", "tokens", "classes", "few_tokens", "token_mean"),
    _sample("tables", "table", "classes", "few_table", "table_mlp"),
    _sample("tensors", "tensor", "classes", "few_tensors", "tensor_mlp"),
    _sample("numbers to predict", "table", "numbers", "few_numbers", "table_mlp"),
    _sample("several labels", "table", "labels", "few_labels", "table_mlp"),
)

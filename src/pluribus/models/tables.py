"""Models for tables (n, columns): first columns of numbers, then columns with the number of a category."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus.inputs import Kind
from pluribus.models.attention import Blocks
from pluribus.models.probe import Shape
from pluribus.models.zoo import Builder, register_model

WIDTH = 64
EMBEDDED = 8  # numbers that stand for one category
COLUMNS: tuple[Kind, ...] = ("table", "tensor")
Categories = tuple[int, ...]  # the number of values of each


def _count(shape: Shape, categories: Categories) -> int:
    """The number of columns of numbers."""
    return torch.Size(shape).numel() - len(categories)


def _split(x: Tensor, categories: int) -> tuple[Tensor, list[Tensor]]:
    """The columns of numbers, and each of the last columns, which are categories."""
    x = x.flatten(1)
    x = x if x.is_floating_point() else x.float()  # a tensor of whole numbers
    numbers = x.shape[1] - categories
    return x[:, :numbers], [x[:, numbers + at].long() for at in range(categories)]


class OneHot(nn.Module):
    """Numbers as they are, and each category as a 1 among zeros."""

    def __init__(self, categories: Categories) -> None:
        super().__init__()
        self.categories = categories

    def forward(self, x: Tensor) -> Tensor:
        numbers, values = _split(x, len(self.categories))
        marks = [
            (value[:, None] == torch.arange(size, device=x.device)).to(numbers.dtype)
            for value, size in zip(values, self.categories, strict=True)
        ]
        return torch.cat([numbers, *marks], 1)


class Columns(nn.Module):
    """Numbers as they are, and learned vectors for categories."""

    def __init__(self, categories: Categories) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, EMBEDDED) for size in categories)

    def forward(self, x: Tensor) -> Tensor:
        numbers, values = _split(x, len(self.embeddings))
        return torch.cat([numbers, *(one(v) for one, v in zip(self.embeddings, values, strict=True))], 1)


def _mlp(*hidden: int) -> Builder:
    def backbone(shape: Shape, categories: Categories) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict(columns=Columns(categories))
        before = _count(shape, categories) + EMBEDDED * len(categories)
        for number, width in enumerate(hidden, 1):
            layers[f"fc{number}"] = nn.Linear(before, width)
            layers[f"fc{number}_relu"] = nn.ReLU()
            before = width
        return nn.Sequential(layers)

    return backbone


class Residual(nn.Module):
    """Two linear layers after a normalization, added to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.fc2(F.relu(self.fc1(self.norm(x))))
        return added


def _resnet(shape: Shape, categories: Categories) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            columns=Columns(categories),
            fc=nn.Linear(_count(shape, categories) + EMBEDDED * len(categories), WIDTH),
            block1=Residual(),
            block2=Residual(),
            norm=nn.LayerNorm(WIDTH),
            relu=nn.ReLU(),
        )
    )


class FTTransformer(nn.Module):
    """Each column is a token: a number times its own vector, or the vector of a category. A class token reads them."""

    num_prefix_tokens = 1
    global_pool = "token"

    def __init__(self, numbers: int, categories: Categories) -> None:
        super().__init__()
        bound = WIDTH**-0.5
        self.weight = nn.Parameter(torch.empty(numbers, WIDTH).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(numbers + len(categories), WIDTH).uniform_(-bound, bound))
        self.embeddings = nn.ModuleList(nn.Embedding(size, WIDTH) for size in categories)
        self.cls_token = nn.Parameter(torch.empty(1, 1, WIDTH).uniform_(-bound, bound))
        self.layers = Blocks(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        numbers, values = _split(x, len(self.embeddings))
        of_categories = [one(value)[:, None] for one, value in zip(self.embeddings, values, strict=True)]
        columns = torch.cat([numbers[..., None] * self.weight, *of_categories], 1) + self.bias
        mixed: Tensor = self.layers(torch.cat([self.cls_token.expand(len(x), -1, -1), columns], 1))
        return mixed[:, 0]


register_model("logistic", "no hidden layer: logistic regression on all columns", takes=(*COLUMNS, "image", "signal"))(
    lambda shape, categories: OneHot(categories)
)
register_model("table-mlp-1", "one hidden layer of 64, for tables", takes=COLUMNS)(_mlp(64))
register_model("table-mlp-2", "hidden layers of 256 and 64, for tables", takes=COLUMNS)(_mlp(256, 64))
register_model("table-mlp-3", "hidden layers of 512, 256 and 64, for tables", takes=COLUMNS)(_mlp(512, 256, 64))
register_model("table-resnet", "two residual blocks of width 64, for tables", takes=COLUMNS)(_resnet)
register_model("ft-transformer", "two transformer blocks of width 64, one token per column", takes=COLUMNS)(
    lambda shape, categories: FTTransformer(_count(shape, categories), categories)
)

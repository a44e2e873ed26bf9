"""FedHPL's tables of parameters and traffic (Tables 5, 6, 8, 9 and 10): nothing runs, models have no weights.

K and M are 1024 and 1024 x 1024, as in the paper. Traffic is what `Method.traffic` says, in numbers of four bytes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from rich.console import Console
from torch import nn

from pluribus.assembly import Assembly, assemble, bytes_per_round
from pluribus.data import Dataset
from pluribus.experiment import experiment
from pluribus.method import Traffic, find
from pluribus.methods._generator import Generator
from pluribus.methods.fedhpl import MOST_LOGITS, FedHPL
from pluribus.methods.pfedpg import Generator as PromptGenerator
from pluribus.methods.pfedpg import PFedPG
from pluribus.methods.pfedpt import Border
from pluribus.models import TwoPartModel, build
from pluribus.models.prompts import Prompting, Style, prompts_of
from pluribus.server import Server
from pluribus.study.reproduce.paper import PaperTable, Printed
from pluribus.study.tables import Cell, Table, markdown_of, show_all

K, M = 1024, 1024**2
VITS = {"ViT-S": "vit-s16", "ViT-B": "vit-b16", "ViT-L": "vit-l16"}
CLASSES = {"CIFAR10/SVHN": 10, "CIFAR100": 100}
LARGE, SMALL = (3, 224, 224), (3, 32, 32)
WIDTH = 512  # what the paper's ResNets exchange
CLIENTS = 5
FLOAT = 4  # bytes

Counts = Iterator[tuple[str, str, float]]
"""Row, column and value, in the unit of the paper."""


@dataclass(frozen=True)
class Counted:
    """A table of a paper with what our code counts."""

    table: PaperTable
    ours: dict[str, dict[str, float]]
    """By row and column."""

    @cached_property
    def differing(self) -> list[tuple[str, str]]:
        """Rows and columns in which ours, rounded as the paper's, is another figure."""
        return [
            (row.name, column)
            for row in self.table.rows
            for column, printed in row.figures.items()
            if _rounded(self.ours[row.name][column], printed) != printed.text
        ]

    @property
    def tables(self) -> list[Table]:
        """A line per figure."""
        rows = []
        for row in self.table.rows:
            for column, printed in row.figures.items():
                same = (row.name, column) not in self.differing
                ours = _rounded(self.ours[row.name][column], printed)
                rows.append(tuple(map(Cell, (f"{row.name}, {column}", ours, printed.text, "" if same else "differs"))))
        return [Table(("", "ours", "paper", ""), tuple(rows))]

    @property
    def notes(self) -> list[str]:
        """Why figures differ, where they do."""
        return list(self.table.notes)

    def show(self, console: Console | None = None) -> None:
        """Print it."""
        show_all(self.table.title, self.tables, self.notes, console or Console(highlight=False))

    def to_markdown(self) -> str:
        """The table and notes in Markdown."""
        return markdown_of(self.tables, self.notes)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "table": self.table.name,
            "title": self.table.title,
            "rows": [
                {
                    "row": row.name,
                    "figures": {
                        column: {"ours": self.ours[row.name][column], "paper": printed.text}
                        for column, printed in row.figures.items()
                    },
                }
                for row in self.table.rows
            ],
            "differing": [list(one) for one in self.differing],
            "notes": self.notes,
        }


def counted(table: PaperTable) -> Counted:
    """Our counts beside the paper's."""
    ours: dict[str, dict[str, float]] = {}
    for row, column, value in COUNTS[table.counted]():
        ours.setdefault(row, {})[column] = value
    return Counted(table, ours)


def _rounded(value: float, like: Printed) -> str:
    return f"{value:.{like.decimals}f}"


# ---- parameters ------------------------------------------------------------------------------------------------------


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _learnt(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


@cache
def _model(name: str, classes: int, shape: tuple[int, int, int] = LARGE) -> TwoPartModel:
    with torch.device("meta"):
        return build(name, shape=shape, classes=classes)


def _prompted(
    name: str, classes: int, style: Style, shape: tuple[int, int, int] = LARGE, number: int = 3
) -> TwoPartModel:
    """A model with FedHPL's prompts."""
    model = copy.deepcopy(_model(name, classes, shape))
    with torch.device("meta"):
        Prompting(style, number, FedHPL.padding).attach(model, shape)
    return model


def _table5() -> Counts:
    for heading, name in VITS.items():
        yield "backbone (M)", heading, _size(_model(name, 10).features) / M
        for data, classes in CLASSES.items():
            yield f"entire model (M), {data}", heading, _size(_model(name, classes)) / M
    yield "pFedPT, G1 (K)", "3 x 32 x 32", _size(Border(SMALL, 4, torch.Generator())) / K
    tokens = prompts_of(_prompted("vit-b16", 10, "shallow", number=PFedPG.prompts))["tokens"]
    made = PromptGenerator(torch.zeros(tokens.shape), CLIENTS, PFedPG.heads, PFedPG.head_width, torch.Generator())
    yield "pFedPG, G2 (M)", "ViT-B", _size(made) / M
    for data, classes in CLASSES.items():
        head = _size(_model("vit-b16", classes).head)
        yield f"pFedPG, F2 (M), {data}", "ViT-B", (_size(made) + tokens.numel() + head) / M


def _table6() -> Counts:
    styles: tuple[Style, ...] = ("shallow", "deep")
    for data, classes in CLASSES.items():
        for heading, name in VITS.items():
            yield f"head (K), {data}", heading, _size(_model(name, classes).head) / K
    for style in styles:
        for heading, name in VITS.items():
            one = prompts_of(_prompted(name, 10, style, number=1))
            yield f"each prompt (K), VPT-{style}", heading, sum(p.numel() for p in one.values()) / K


def _table8() -> Counts:
    for pixels, shape in ((32, SMALL), (224, LARGE)):
        for name, prompt in prompts_of(_prompted("resnet18", 10, "deep", shape)).items():
            yield name, f"{pixels} pixels", prompt.numel()
    for data, classes in CLASSES.items():
        for heading, name in (("ResNet18, ResNet34", "resnet18"), ("ResNet50", "resnet50")):
            row = f"{heading}, {data}"
            yield row, "head (K)", _size(_model(name, classes).head) / K
            for pixels, shape in ((32, SMALL), (224, LARGE)):
                learnt = _learnt(_prompted(name, classes, "deep", shape))
                yield row, f"sum (K), {pixels} pixels", learnt / K


# ---- traffic ---------------------------------------------------------------------------------------------------------


@cache
def _federation(classes: int) -> Assembly:
    """Five clients with the paper's ResNets and blank images; everyone holds every class."""
    images = torch.zeros(classes * CLIENTS * 20, 3, 32, 32, dtype=torch.uint8)
    names = tuple(map(str, range(classes)))
    blank = Dataset("blank", images, torch.arange(len(images)) % classes, names)
    federation = experiment("local", clients=CLIENTS, models="fedhpl-resnet", width=WIDTH, device="cpu")
    return assemble(dataclasses.replace(federation, partition="iid", public_fraction=0.2), blank)


def _traffic(method: str, classes: int, **hyper: Any) -> Traffic:
    """Numbers that a client sends and gets in a round."""
    found = bytes_per_round(dataclasses.replace(_federation(classes), method=find(method)(**hyper)))
    return Traffic(found.up / FLOAT, found.down / FLOAT)


def _table9() -> Counts:
    for data, classes in CLASSES.items():
        yield "FedGen, but for |D_k|", data, _traffic("fedgen", classes).up
        for heading in ("FedGH", "FedProto", "FedTGP", "FedHE"):
            yield heading, data, _traffic(heading.lower(), classes).up
        yield "FedMD, each public sample", data, _traffic("fedmd", classes, align=1).up
        yield "FedHPL, each correct logit", data, _traffic("fedhpl", classes, upload="full").up / MOST_LOGITS
        yield "FedHPL+", data, _traffic("fedhpl", classes).up
        with torch.device("meta"):
            yield "FedGen, G (M)", data, _size(Generator(WIDTH, classes, WIDTH, WIDTH)) / M
        yield "FedGH, H_g", data, _traffic("fedgh", classes).down
        server = Server(_federation(classes).task, _federation(classes).cards)
        find("fedtgp")().setup(server)
        yield "FedTGP, G_p (M)", data, _size(server.state.net) / M


def _table10() -> Counts:
    for data, classes in CLASSES.items():
        yield "average upload of all clients (K)", data, CLIENTS * _traffic("fedhpl", classes).up / K


COUNTS: dict[str, Callable[[], Counts]] = {
    "table5": _table5,
    "table6": _table6,
    "table8": _table8,
    "table9": _table9,
    "table10": _table10,
}

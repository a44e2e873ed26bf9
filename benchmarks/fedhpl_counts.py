"""FedHPL's tables of parameters and traffic (Ma et al., arXiv 2024): ours beside the paper's figures.

    python benchmarks/fedhpl_counts.py

These are Tables 5, 6, 8, 9 and 10. Nothing runs, and models have no weights: it takes seconds on a CPU. Each table is a
TOML file in fedhpl_counts/, with the paper's figures as text, to the digit as they are printed. K and M are 1024 and
1024 x 1024, as in the paper. Traffic is what `Method.traffic` says, in numbers of four bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from pluribus.assembly import Assembly, assemble, bytes_per_round
from pluribus.data import Dataset
from pluribus.experiment import experiment
from pluribus.internal.tables import Cell, Table, print_tables
from pluribus.method import Traffic, find
from pluribus.methods._border import Border
from pluribus.methods._generator import Generator
from pluribus.methods._prompt_generator import Generator as PromptGenerator
from pluribus.methods._reports import MOST_LOGITS
from pluribus.methods.fedhpl import FedHPL
from pluribus.methods.pfedpg import PFedPG
from pluribus.models import TwoPartModel, build
from pluribus.models.prompts import Prompting, Style, prompts_of
from pluribus.server import Server

TABLES = Path(__file__).parent / "fedhpl_counts"
K, M = 1024, 1024**2
VITS = {"ViT-S": "vit-s16", "ViT-B": "vit-b16", "ViT-L": "vit-l16"}
CLASSES = {"CIFAR10/SVHN": 10, "CIFAR100": 100}
LARGE, SMALL = (3, 224, 224), (3, 32, 32)
WIDTH = 512  # what the paper's ResNets exchange
CLIENTS = 5
FLOAT = 4  # bytes

Counts = Iterator[tuple[str, str, float]]
"""Row, column and value, in the unit of the paper."""
Figures = dict[str, dict[str, str]]
"""As text, by row and column."""


@dataclass(frozen=True)
class Counted:
    """A table of the paper with what our code counts."""

    title: str
    notes: list[str]
    """Why figures differ, where they do."""
    paper: Figures
    exact: dict[str, dict[str, float]]
    """Ours, by row and column."""

    @cached_property
    def ours(self) -> Figures:
        """Rounded as the paper's."""
        return {
            row: {column: rounded(self.exact[row][column], text) for column, text in figures.items()}
            for row, figures in self.paper.items()
        }

    @cached_property
    def differing(self) -> list[tuple[str, str]]:
        """Rows and columns in which ours is another figure."""
        pairs = [(row, column) for row, figures in self.paper.items() for column in figures]
        return [(row, column) for row, column in pairs if self.ours[row][column] != self.paper[row][column]]

    def show(self) -> None:
        """Print a line per figure."""
        lines = [
            (f"{row}, {column}", text, self.paper[row][column], "differs" if (row, column) in self.differing else "")
            for row, figures in self.ours.items()
            for column, text in figures.items()
        ]
        table = Table(("", "ours", "paper", ""), tuple(tuple(map(Cell, line)) for line in lines))
        print_tables(self.title, [table], self.notes, Console(highlight=False))


def counted(name: str) -> Counted:
    """Our counts beside the paper's."""
    written = tomllib.loads((TABLES / f"{name}.toml").read_text(encoding="utf-8"))
    exact: dict[str, dict[str, float]] = {}
    for row, column, value in COUNTS[name]():
        exact.setdefault(row, {})[column] = value
    paper = {row: told["paper"] for row, told in written["rows"].items()}
    return Counted(written["title"], written.get("notes", []), paper, exact)


def rounded(value: float, like: str) -> str:
    """A number with as many digits behind the point as a figure has."""
    return f"{value:.{len(like.partition('.')[2])}f}"


# ---- parameters ------------------------------------------------------------------------------------------------------


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _learned(module: nn.Module) -> int:
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
    yield "pFedPT, G1 (K)", "3 x 32 x 32", _size(Border(SMALL, 4)) / K
    tokens = prompts_of(_prompted("vit-b16", 10, "shallow", number=PFedPG.prompts))["tokens"]
    made = PromptGenerator(torch.zeros(tokens.shape), CLIENTS, PFedPG.heads, PFedPG.head_width)
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
                learned = _learned(_prompted(name, classes, "deep", shape))
                yield row, f"sum (K), {pixels} pixels", learned / K


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


def main() -> None:
    for name in COUNTS:
        counted(name).show()


if __name__ == "__main__":
    main()

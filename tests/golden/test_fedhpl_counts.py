"""FedHPL's tables of parameters and traffic, which a script of benchmarks/ counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from fedhpl_counts import COUNTS, counted, main

# Each place where ours is another figure; the notes of the tables say why.
DIFFERING = {
    "table5": [("entire model (M), CIFAR10/SVHN", "ViT-S")],
    "table9": [
        ("FedMD, each public sample", "CIFAR10/SVHN"),
        ("FedMD, each public sample", "CIFAR100"),
        ("FedHPL+", "CIFAR10/SVHN"),
        ("FedHPL+", "CIFAR100"),
        ("FedGen, G (M)", "CIFAR10/SVHN"),
        ("FedGen, G (M)", "CIFAR100"),
    ],
    "table10": [
        ("average upload of all clients (K)", "CIFAR10/SVHN"),
        ("average upload of all clients (K)", "CIFAR100"),
    ],
}


pytestmark = pytest.mark.xdist_group("counts")  # in one process, because tables share models


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_papers_but_where_it_is_explained(name: str) -> None:
    found = counted(name)
    assert found.differing == DIFFERING.get(name, [])
    assert bool(found.differing) <= bool(found.notes)
    assert {row: set(of) for row, of in found.paper.items()} == {row: set(of) for row, of in found.exact.items()}


def test_what_differs_in_the_traffic_is_what_the_notes_say() -> None:
    """Class numbers beside the logits: 10 and 100 for each client; FedMD's public classes; biases before batch norm."""
    traffic = counted("table9").exact
    for data, classes in (("CIFAR10/SVHN", 10), ("CIFAR100", 100)):
        assert traffic["FedHPL+"][data] - classes == classes**2 + classes
        assert traffic["FedMD, each public sample"][data] + 10 + 1 == classes + 10 + 1
        printed = {"CIFAR10/SVHN": "0.507", "CIFAR100": "0.551"}[data]
        assert f"{traffic['FedGen, G (M)'][data] + 512 / 2**20:.3f}" == printed  # a bias for each hidden unit
    total = counted("table10").exact["average upload of all clients (K)"]
    assert [f"{total[data] - 5 * n / 1024:.2f}" for data, n in (("CIFAR10/SVHN", 10), ("CIFAR100", 100))] == [
        "0.54",
        "49.32",
    ]


def test_figures_are_those_of_the_paper() -> None:
    assert counted("table6").paper["head (K), CIFAR100"] == {"ViT-S": "37.60", "ViT-B": "75.10", "ViT-L": "100.10"}


def test_what_differs_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    marked = [line for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith("differs")]
    assert len(marked) == sum(map(len, DIFFERING.values()))

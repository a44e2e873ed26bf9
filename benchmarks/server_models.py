"""HeteroFL, FedRolex and FedDF on CIFAR-10: accuracy of the server's models and of clients.

    python benchmarks/server_models.py [--rows 15000] [--rounds 40] [--json] [NAME...]

HeteroFL and FedRolex: 30 clients with ResNet-18, of which 10 take part in a round of 2 epochs, on equal shares of the
classes or on two classes each; levels a to e have the shares 1, 1/2, 1/4, 1/8 and 1/16 of the width. FedDF: 20 clients,
of which 8 take part in a round of 10 epochs, on Dirichlet shares of the classes, beside FedAvg with the same model; and
with three architectures, where FedAvg cannot run. Its public rows are a tenth of each client's, without labels. Every
run ends with an evaluation on the test rows of all clients. A row of the table is one run.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from typing import Any

import torch

import pluribus
from pluribus.data import load

LEVELS = "1,0.5,0.25,0.125,0.0625"
COMMON = {
    "batch_size": 10,
    "lr": 0.05,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "progress": False,
    "augment": "crop,flip",
}
SUB = {"clients": 30, "participation": 1 / 3, "epochs": 2, "models": "resnet18"}
DF = {
    "clients": 20,
    "participation": 0.4,
    "epochs": 10,
    "batch_size": 64,
    "partition": "dirichlet",
    "test_fraction": 0.2,
}
PUBLIC = {"public_fraction": 0.1}
TWO = {"partition": "pathological", "classes_per_client": 2}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "heterofl a, iid": ("heterofl", SUB | {"capacity": "1", "partition": "iid"}),
    "heterofl a-e, iid": ("heterofl", SUB | {"capacity": LEVELS, "partition": "iid"}),
    "fedrolex a-e, iid": ("fedrolex", SUB | {"capacity": LEVELS, "partition": "iid"}),
    "heterofl a-e, 2 classes": ("heterofl", SUB | {"capacity": LEVELS} | TWO),
    "fedavg resnet8, alpha 1": ("fedavg", DF | PUBLIC | {"models": "resnet8", "alpha": 1.0}),
    "feddf resnet8, alpha 1": ("feddf", DF | PUBLIC | {"models": "resnet8", "alpha": 1.0}),
    "fedavg resnet8, alpha 0.1": ("fedavg", DF | PUBLIC | {"models": "resnet8", "alpha": 0.1}),
    "feddf resnet8, alpha 0.1": ("feddf", DF | PUBLIC | {"models": "resnet8", "alpha": 0.1}),
    "feddf mixed, alpha 1": ("feddf", DF | PUBLIC | {"models": "resnet8,resnet10,cnn4", "alpha": 1.0}),
}


def some_rows(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rows of CIFAR-10 in an order that a key draws."""
    whole = load("cifar10")
    order = torch.randperm(len(whole.y), generator=torch.Generator().manual_seed(0))[:rows]
    return whole.x[order], whole.y[order]


def measure(name: str, data: Any, rounds: int) -> dict[str, Any]:
    """One run: accuracy on all test rows together, in every view."""
    method, settings = RUNS[name]
    started = time.perf_counter()
    result = pluribus.run(method, data=data, rounds=rounds, evaluate_every=rounds, **(COMMON | settings))
    last = {view: result.summary[view]["last"]["test"]["weighted"] for view in result.views}
    per_round = {way: total / rounds / 1e6 for way, total in result.bytes.items() if way != "evaluation"}
    return {"run": name, **last, **per_round, "rounds": rounds, "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"runs: {', '.join(RUNS)} (default: all)")
    parser.add_argument("--rows", type=int, default=15_000, help="rows of CIFAR-10")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON object per run, and nothing else")
    given = parser.parse_args()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    data = some_rows(given.rows)
    for name in given.names or RUNS:
        row = measure(name, data, given.rounds) | {"rows": given.rows, "hardware": where, "torch": torch.__version__}
        print(json.dumps(row) if given.json else row, flush=True)


if __name__ == "__main__":
    main()

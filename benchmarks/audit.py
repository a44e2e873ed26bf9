"""What attacks find in the uploads of the five papers' methods, with and without differential privacy.

    python benchmarks/audit.py --data digits --seeds 3 [--private] [--json]
    python benchmarks/audit.py --data cifar10 --private [--page audit.html] [--json]

Every method runs and is audited (`pluribus.audit`). `--private` adds the same runs with differential privacy. On
CIFAR-10, clients hold few rows each, so that they can memorize them; FedHPL gets gray 16 x 16 pictures, for which the
package has pretrained backbones. FedAvg with one step on few rows shows that inversion works where it should. `--page`
writes the page of the last seed. Numbers are means over seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch.nn import functional as F

import pluribus
from pluribus.data import load

# All settings are here: of privacy, of a data set, and of a method on it.
PRIVACY = {"dp_epsilon": 8.0, "dp_delta": 1e-5, "dp_clip": 1.0}
COMMON = {"partition": "dirichlet", "alpha": 1.0, "progress": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"clients": 8, "rounds": 20, "models": "mlp-64,cnn-16,mlp-128-64"},
    "cifar10": {"clients": 10, "rounds": 15, "epochs": 2, "batch_size": 32, "models": "fedgh"},
}
ONE_STEP = {"partition": "iid", "rounds": 10, "epochs": 1, "batch_size": 100, "lr": 0.1, "optimizer": "sgd"}
FEW_STEPS = {"public_fraction": 0.1, "epochs": 1, "batch_size": 32}  # a round of FedH2L is one local step
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "fedgh": {"digits": {}, "cifar10": {}},
    "fedl2g-l": {"digits": {"warmup": 20}, "cifar10": {"warmup": 10}},
    "fedh2l": {"digits": FEW_STEPS | {"rounds": 200}, "cifar10": FEW_STEPS | {"rounds": 200}},
    "fedfree": {"digits": {"image_size": 16}, "cifar10": {}},
    "fedavg": {
        "digits": ONE_STEP | {"clients": 60, "models": "mlp-64"},
        "cifar10": ONE_STEP | {"clients": 150, "models": "cnn4"},
    },
    "fedhpl": {"digits": {"image_size": 16, "models": "tiny"}, "cifar10": {"models": "tiny"}},
}
ROWS = 5000  # of CIFAR-10
AUDIT = {"clients": 10, "steps": 300}


def data_for(name: str, method: str) -> Any:
    """The data of a run: a name, or some rows of CIFAR-10."""
    if name == "digits":
        return name
    whole = load(name)
    order = torch.randperm(len(whole.y), generator=torch.Generator().manual_seed(0))[:ROWS]
    x, y = whole.x[order], whole.y[order]
    if method == "fedhpl":
        x = F.avg_pool2d(x.float().mean(1, keepdim=True), 2).round().byte()
    return x, y


def run(name: str, method: str, seed: int, private: bool) -> pluribus.Result:
    """One run of a method."""
    settings = COMMON | SETTINGS[name] | METHODS[method][name] | (PRIVACY if private else {})
    return pluribus.run(method, data=data_for(name, method), seed=seed, **settings)


def runs_of(name: str, seed: int, private: bool, refused: dict[str, str]) -> dict[tuple[str, bool], pluribus.Result]:
    """The runs of all methods by method and privacy. `refused` gets the reasons of methods that cannot be private."""
    found = {}
    for method in METHODS:
        found[method, False] = run(name, method, seed, False)
        try:
            if private:
                found[method, True] = run(name, method, seed, True)
        except pluribus.PluribusError as error:
            refused[method] = error.sentence
    return found


def measure(name: str, seeds: int, private: bool, page: str | None) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The audits of all methods as rows: one per method, privacy, field and attack, with the mean over seeds. And why
    methods were refused with privacy."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    refused: dict[str, str] = {}
    for seed in range(seeds):
        results = runs_of(name, seed, private, refused)
        audit = pluribus.audit(*results.values(), **AUDIT)
        for (kind, result), one in zip(results.items(), audit.runs, strict=True):
            for row in one.rows():
                if row["attack"] != "disclosure":
                    found[*kind, row["field"], row["attack"]].append(row | {"score": result.score})
        if page is not None and seed == seeds - 1:
            audit.save(page)
    return [_mean(*key, rows) for key, rows in found.items()], refused


def _mean(method: str, private: bool, field: str, attack: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    known = {
        name: [row[name] for row in rows if row[name] is not None] for name in ("value", "without", "score", "epsilon")
    }
    about = {"method": method, "private": private, "field": field, "source": rows[0]["source"], "attack": attack}
    means = {name: statistics.fmean(values) if values else None for name, values in known.items()}
    spread = statistics.stdev(known["value"]) if len(known["value"]) > 1 else None
    return about | means | {"deviation": spread, "seeds": len(rows), "says": rows[0]["says"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=list(SETTINGS), default="digits")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--private", action="store_true", help="add runs with differential privacy")
    parser.add_argument("--page", help="write the page of the last seed to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    given = parser.parse_args()
    started = time.perf_counter()
    rows, refused = measure(given.data, given.seeds, given.private, given.page)
    seconds = round(time.perf_counter() - started, 1)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    if given.json:
        about = {"data": given.data, "seeds": given.seeds, "seconds": seconds, "hardware": where}
        print(json.dumps(about | {"torch": torch.__version__, "rows": rows, "refused": refused}))
        return
    columns = ("method", "epsilon", "accuracy", "field", "attack", "value", "guess")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        epsilon, score, value, guess = (_text(row[name]) for name in ("epsilon", "score", "value", "without"))
        print(f"| {row['method']} | {epsilon} | {score} | {row['field']} | {row['attack']} | {value} | {guess} |")
    for method, reason in refused.items():
        print(f"\n{method} cannot be private: {reason}")
    print(f"\n{given.seeds} seeds, {seconds} s, {where}")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()

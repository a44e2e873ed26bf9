"""What the framework costs: a round against the bare loop that trains and evaluates the same, by `pluribus.bench`.

    python benchmarks/overhead.py [--json]

`local` shows the framework alone. A round of FedGH also holds the method's own work, such as a forward pass over all
training images for the class means, which the bare loop has not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import pluribus

CASES = [  # method, models, clients, training images of each
    ("local", "cnn4", 4, 280),
    ("local", "fedgh-cnn5", 4, 280),
    ("fedgh", "fedgh-cnn5", 4, 280),
    ("local", "resnet10", 2, 140),
]
BATCH, THREADS, ROUNDS = 10, 1, 5


def photos(clients: int, samples: int) -> str:
    """The name of a set of random photos of which 70 % of each client's rows make so many training images."""
    name, rows = f"photos-{clients}-{samples}", clients * -(-samples * 10 // 7)

    def images() -> pluribus.Dataset:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return pluribus.Dataset(name, x, torch.arange(rows) % 10, tuple("0123456789"))

    if name not in pluribus.data.entries():
        pluribus.register_data(name, "random 32 x 32 photos")(images)
    return name


def measure(method: str, models: str, clients: int, samples: int) -> pluribus.Bench:
    return pluribus.bench(
        method,
        data=photos(clients, samples),
        partition="iid",
        clients=clients,
        models=models,
        batch_size=BATCH,
        threads=THREADS,
        rounds=ROUNDS,
        device="cpu",
        progress=False,
    )


def row(case: tuple[str, str, int, int], report: pluribus.Bench) -> dict[str, Any]:
    assert report.bare_seconds is not None
    assert report.ratio is not None
    return {
        **dict(zip(("method", "models", "clients", "images"), case, strict=True)),
        "round_s": round(report.seconds, 3),
        "bare_s": round(report.bare_seconds, 3),
        "ratio": round(report.ratio, 3),
    }


def main() -> None:
    reports = [measure(*case) for case in CASES]
    rows = [row(case, report) for case, report in zip(CASES, reports, strict=True)]
    machine = reports[0].machine
    facts = {"torch": machine.torch, "threads": machine.threads, "device": machine.device, "rows": rows}
    Path(__file__).with_name("results").joinpath("overhead.json").write_text(json.dumps(facts, indent=1) + "\n")
    if "--json" in sys.argv:
        print(json.dumps(facts))
        return
    print(f"images 3x32x32, batch {BATCH}, SGD, one epoch, all evaluated each round, {machine.threads} threads")
    for one in rows:
        print("  {method:6} {models:11} round {round_s:.3f} s   bare {bare_s:.3f} s   ratio {ratio:.3f}".format(**one))


if __name__ == "__main__":
    main()

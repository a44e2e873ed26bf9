"""Sub-models beside knowledge on the same clients, capacities and data: accuracy, bytes and multiply-adds.

    python benchmarks/families.py [FOLDER]

Every method trains the same clients of digits, of which each has a share of the channels of one CNN. Accuracies are
those of `pluribus compare`, with its paired test against `local`. Bytes are those that were sent. Multiply-adds are
counted as the training of a client computes them, forward and backward, in one round; see `pluribus.models.cost`.
Results go to results/families.json. FOLDER keeps the runs, so that a stopped script can be resumed.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch

import pluribus
from pluribus.client import Client
from pluribus.message import Message
from pluribus.method import Method, find
from pluribus.models import build
from pluribus.models.cost import counting, multiply_adds

FILE = Path(__file__).parent / "results" / "families.json"
METHODS = ("local", "heterofl", "fedrolex", "fjord", "fedgh", "fedproto", "fd")
CAPACITIES = (1.0, 0.5, 0.25)
MODEL, CLIENTS, ROUNDS, SEEDS = "cnn-16-32", 8, 50, 3
SETTINGS: dict[str, Any] = {
    "models": MODEL,
    "capacity": CAPACITIES,
    "clients": CLIENTS,
    "lr": 0.1,
}


def count_training(name: str) -> float:
    """Multiply-adds of the training of a client in one round, as a mean over clients."""
    cls, found = find(name), list[int]()
    original = cls.local_update

    def local_update(self: Method, client: Client) -> Message | None:
        with counting() as count:
            sent = original(self, client)
        found.append(count.multiply_adds)
        return sent

    with patch.object(cls, "local_update", local_update):
        pluribus.run(name, rounds=1, workers=1, device="cpu", progress=False, **SETTINGS)
    assert len(found) == CLIENTS
    return fmean(found)


def describe_models() -> list[dict[str, Any]]:
    """The model of each capacity."""
    rows = []
    for share in CAPACITIES:
        name = MODEL if share == 1 else f"{MODEL}@{share:g}"
        model = build(name, shape=(1, 8, 8), classes=10)
        parameters = sum(one.numel() for one in model.parameters())
        products = multiply_adds(model, (1, 8, 8))
        rows.append({"model": f"`{name}`", "parameters": parameters, "multiply-adds of a forward pass": products})
    return rows


def compare(folder: str | None) -> list[dict[str, Any]]:
    """A row for each method."""
    table = pluribus.compare(METHODS, seeds=SEEDS, rounds=ROUNDS, out=folder, jobs=1, **SETTINGS)
    tested, rows = {one.label: one for one in table.differences}, []
    for row in table.rows:
        test, over = tested.get(row.label), CLIENTS * ROUNDS
        against = p = ""
        if test is not None and test.difference is not None:
            one = test.difference
            against = f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f}), {test.verdict}"
            p = "below 0.001" if test.p < 0.001 else f"{test.p:.3f}"
        rows.append(
            {
                "method": f"`{row.label}`",
                "family": find(row.label).family,
                "after": str(row.by_view["after"]),
                "global": str(row.by_view.get("global", "")),
                "against `local`, after": against,
                "p": p,
                "bytes up": round(row.up / over),
                "bytes down": round(row.down / over),
                "million multiply-adds": round(count_training(row.label) / 1e6, 1),
            }
        )
    return rows


def main() -> None:
    """Compare, and write the results."""
    rows = compare(sys.argv[1] if len(sys.argv) > 1 else None)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    written = {"command": "python benchmarks/families.py", "hardware": "2 CPU cores", **versions, "rows": rows}
    written |= {"models": describe_models()}
    FILE.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()

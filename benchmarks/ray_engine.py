"""What a round costs on Ray before anyone trains: 20 clients on 2 actors, 100 kB each way.

    python benchmarks/ray_engine.py [--json]

The method sends a tensor of 25,000 numbers down and the same up, and does nothing else. Both engines write and check
every message; what Ray adds is in the difference.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

import pluribus
from pluribus import Client, Field, Message, Method, Server, Wire

CLIENTS, NUMBERS, ROUNDS = 20, 25_000, 60


@dataclass(frozen=True)
class Echo(Method):
    """What comes down goes up."""

    def schema(self, task: pluribus.Task, card: pluribus.Card) -> Wire:
        numbers = {"numbers": Field((NUMBERS,))}
        return Wire(down=numbers, up=numbers)

    def download(self, server: Server, client: int) -> Message:
        return Message({"numbers": torch.full((NUMBERS,), float(client))})

    def local_update(self, client: Client) -> Message:
        return Message({"numbers": client.got.tensor("numbers")})


def seconds(**how: Any) -> list[float]:
    """Of each round after the first few."""
    with tempfile.TemporaryDirectory() as folder:
        result = pluribus.run(
            Echo,
            clients=CLIENTS,
            models="mlp-64",
            partition="iid",
            rounds=ROUNDS,
            evaluate_every=ROUNDS,
            checkpoint_every=ROUNDS,
            threads=1,
            device="cpu",
            out=f"{folder}/run",
            progress=False,
            **how,
        )
    return [record["seconds"] for record in result.history[5:-1]]


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ways = {"serial": {}, "ray, 2 actors": {"engine": "ray", "workers": 2}}
    rows = []
    for way, how in ways.items():
        own = seconds(**how)
        rows.append(
            {
                "way": way,
                "round_ms": round(1000 * statistics.median(own), 1),
                "p95_ms": round(1000 * statistics.quantiles(own, n=20)[-1], 1),
            }
        )
    facts = {
        "command": "python benchmarks/ray_engine.py",
        "ray": ray.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "rows": rows,
    }
    if "--json" in sys.argv:
        print(json.dumps(facts))
        return
    Path(__file__).with_name("results").joinpath("ray.json").write_text(json.dumps(facts, indent=1) + "\n")
    for one in rows:
        print("{way:16} round {round_ms:6.1f} ms   95 % below {p95_ms:6.1f} ms".format(**one))


if __name__ == "__main__":
    main()

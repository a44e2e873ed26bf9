"""What the framework costs: a round of local training against the bare loop of forward, backward and step.

    python benchmarks/overhead.py [--json]

Both work on the same tensors in the same process, in turns, so that the ratio holds on a noisy machine. The round
counts everything: sampling, shuffling, keyed draws, records, traffic, checkpoints. Evaluation is left to the last one.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import pluribus
from pluribus.federation import Federation

CLIENTS, SAMPLES, BATCH, ROUNDS = 4, 280, 10, 12


@pluribus.register_data("overhead-photos", "random 32 x 32 photos")
def photos() -> pluribus.Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = CLIENTS * SAMPLES * 10 // 7  # 70 % of each client's rows are for training
    x = torch.randint(0, 256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return pluribus.Dataset("overhead-photos", x, torch.arange(rows) % 10, tuple("0123456789"))


class BareLoop:
    """After every round, the same training by hand; both are timed."""

    def __init__(self) -> None:
        self.framework: list[float] = []
        self.bare: list[float] = []

    def start(self, federation: Federation) -> None:
        parts = federation.parts
        self._work = []
        for k in range(CLIENTS):
            x, y = parts.data.sets(k)["train"].take(torch.arange(parts.cards[k].samples))
            model = parts.task.build(parts.cards[k].model, "bare", k)
            self._work.append((model, torch.optim.SGD(model.parameters(), lr=0.01), x, y))
        self._ended = time.perf_counter()

    def round(self, record: Any, ledger: Any) -> None:
        self.framework.append(time.perf_counter() - self._ended)
        started = time.perf_counter()
        for model, optimiser, x, y in self._work:
            model.train()
            for bx, by in zip(x.split(BATCH), y.split(BATCH), strict=True):
                optimiser.zero_grad()
                F.cross_entropy(model(bx), by).backward()
                optimiser.step()
        self._ended = time.perf_counter()
        self.bare.append(self._ended - started)

    def finish(self, result: pluribus.Result) -> None:
        pass


def measure(model: str) -> dict[str, Any]:
    watch = BareLoop()
    with tempfile.TemporaryDirectory() as out:
        pluribus.run(
            "local",
            data="overhead-photos",
            partition="iid",
            clients=CLIENTS,
            models=model,
            batch_size=BATCH,
            rounds=ROUNDS,
            evaluate_every=ROUNDS,
            out=out,
            progress=False,
            observers=[watch],
        )
    ours, bare = watch.framework[1:-1], watch.bare[1:-1]  # warm, without the evaluation of the last round
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    return {
        "model": model,
        "round_s": round(statistics.median(ours), 4),
        "bare_s": round(statistics.median(bare), 4),
        "ratio": round(statistics.median(ratios), 3),
    }


def main() -> None:
    rows = [measure(model) for model in ("cnn4", "fedgh-cnn5", "resnet10")]
    threads = torch.get_num_threads()
    facts = {"torch": torch.__version__, "threads": threads, "machine": platform.machine(), "rows": rows}
    Path(__file__).with_name("results").joinpath("overhead.json").write_text(json.dumps(facts, indent=1) + "\n")
    if "--json" in sys.argv:
        print(json.dumps(facts))
        return
    print(f"{CLIENTS} clients of {SAMPLES} images 3x32x32, batch {BATCH}, SGD, {threads} threads")
    for row in rows:
        print("  {model:12} round {round_s:.3f} s   bare {bare_s:.3f} s   ratio {ratio:.3f}".format(**row))


if __name__ == "__main__":
    main()

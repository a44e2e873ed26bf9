"""What worker processes gain on a CPU: the same federation with one process, with two, and by default.

    python benchmarks/workers.py [--json]

FedGH with HtFE2, 20 clients of 150 training images, evaluation of everyone after every round. Each way has a process of
its own; they take turns, one round at a time, so that a noisy machine is noisy for all. A round counts whole: training,
messages, server, evaluation, records. The first one, in which processes start and models are built, and the last one,
which ends with the only checkpoint, are told apart. By default, processes start in the background of the first round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import torch

import pluribus

CLIENTS, SAMPLES, BATCH, ROUNDS = 20, 150, 10, 7
WAYS = {
    "serial, 2 threads": {"workers": 1, "threads": 2},
    "serial, 1 thread": {"workers": 1, "threads": 1},
    "2 workers, 1 thread each": {"workers": 2, "threads": 1},
    "auto, the default": {},
}


@pluribus.register_data("workers-photos", "random 32 x 32 photos")
def photos() -> pluribus.Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = CLIENTS * SAMPLES * 10 // 7  # 70 % of each client's rows are for training
    x = torch.randint(0, 256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return pluribus.Dataset("workers-photos", x, torch.arange(rows) % 10, tuple("0123456789"))


class Turns:
    """Times the rounds of one way, and waits before each until a line on standard input says that it is its turn."""

    def start(self, federation: Any) -> None:
        self._wait()

    def round(self, record: Any, ledger: Any) -> None:
        print(time.perf_counter() - self._started, flush=True)
        if record["round"] < ROUNDS - 1:
            self._wait()

    def finish(self, result: pluribus.Result) -> None:
        pass

    def _wait(self) -> None:
        sys.stdin.readline()
        self._started = time.perf_counter()


def run(way: str) -> None:
    """All rounds of one way, in this process."""
    with tempfile.TemporaryDirectory() as out:
        pluribus.run(
            "fedgh",
            data="workers-photos",
            partition="iid",
            clients=CLIENTS,
            models="htfe2",
            batch_size=BATCH,
            rounds=ROUNDS,
            checkpoint_every=ROUNDS,
            device="cpu",
            out=out,
            progress=False,
            observers=[Turns()],
            **WAYS[way],
        )


def measure() -> dict[str, list[float]]:
    """Seconds of every round, by way: a process for each, and one of them at work."""
    processes = {
        way: subprocess.Popen([sys.executable, __file__, "--way", way], stdin=PIPE, stdout=PIPE, text=True, bufsize=1)
        for way in WAYS
    }
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(ROUNDS):
        for way, process in processes.items():
            assert process.stdin
            assert process.stdout
            print("go", file=process.stdin)
            seconds[way].append(float(process.stdout.readline()))
            print(f"{way}, round {number}: {seconds[way][-1]:.2f} s", file=sys.stderr)
    for process in processes.values():
        process.wait()
    return seconds


def row(way: str, seconds: list[float], base: list[float]) -> dict[str, Any]:
    """What the rounds of a way come to, compared with another's, each round with the one of the same turn."""
    ratios = [other / own for other, own in zip(base[1:-1], seconds[1:-1], strict=True)]
    return {
        "way": way,
        "first_round_s": round(seconds[0], 2),
        "round_s": round(statistics.median(seconds[1:-1]), 2),
        "last_round_s": round(seconds[-1], 2),
        "all_rounds_s": round(sum(seconds), 1),
        "times_faster": round(statistics.median(ratios), 2),
    }


def main() -> None:
    seconds = measure()
    base = next(iter(seconds.values()))
    facts = {
        "command": "python benchmarks/workers.py",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "rows": [row(way, own, base) for way, own in seconds.items()],
        "seconds": {way: [round(s, 2) for s in own] for way, own in seconds.items()},
    }
    Path(__file__).with_name("results").joinpath("workers.json").write_text(json.dumps(facts, indent=1) + "\n")
    if "--json" in sys.argv:
        print(json.dumps(facts))
        return
    print(f"fedgh, htfe2, {CLIENTS} clients of {SAMPLES} images 3x32x32, batch {BATCH}, {os.cpu_count()} cores")
    for one in facts["rows"]:
        times = "first {first_round_s:6.2f} s   round {round_s:6.2f} s   last {last_round_s:6.2f} s"
        print(("  {way:26} " + times + "   all {all_rounds_s:6.1f} s   {times_faster:.2f} x").format(**one))


if __name__ == "__main__":
    run(sys.argv[2]) if sys.argv[1:2] == ["--way"] else main()

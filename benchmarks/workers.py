"""What worker processes gain on a CPU: the same federation with one process and with two.

    python benchmarks/workers.py [--json]

FedGH with HtFE2, 20 clients of 150 training images, evaluation of everyone after every round. All ways are under way at
once, but one round at a time, in turns, so that a noisy machine is noisy for all. A round counts whole: training,
messages, server, evaluation, records. The first one, in which processes start and models are built, and the last one,
which ends with the only checkpoint, are told apart.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import pluribus

CLIENTS, SAMPLES, BATCH, ROUNDS = 20, 150, 10, 7
WAYS = {
    "serial, 2 threads": {"workers": 1, "threads": 2},
    "serial, 1 thread": {"workers": 1, "threads": 1},
    "2 workers, 1 thread each": {"workers": 2, "threads": 1},
}


@pluribus.register_data("workers-photos", "random 32 x 32 photos")
def photos() -> pluribus.Dataset:
    generator = torch.Generator().manual_seed(0)
    rows = CLIENTS * SAMPLES * 10 // 7  # 70 % of each client's rows are for training
    x = torch.randint(0, 256, (rows, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return pluribus.Dataset("workers-photos", x, torch.arange(rows) % 10, tuple("0123456789"))


class Turns:
    """Lets threads go on one at a time, each until it asks for its next turn."""

    def __init__(self, number: int) -> None:
        self._batons = [threading.Semaphore(0) for _ in range(number)]
        self._left = set(range(number))
        self._batons[0].release()

    def wait(self, mine: int) -> None:
        self._batons[mine].acquire()

    def pass_on(self, mine: int, last: bool) -> None:
        if last:
            self._left.remove(mine)
        others = sorted(self._left, key=lambda number: (number <= mine, number))
        if others:
            self._batons[others[0]].release()


class Stopwatch:
    """Times the rounds of one way, and lets the others have theirs in between."""

    def __init__(self, turns: Turns, mine: int, threads: int) -> None:
        self.seconds: list[float] = []
        self._turns, self._mine, self._threads = turns, mine, threads

    def start(self, federation: Any) -> None:
        self._started = time.perf_counter()

    def round(self, record: Any, ledger: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)
        print(f"way {self._mine}, round {record['round']}: {self.seconds[-1]:.2f} s", file=sys.stderr)
        last = len(self.seconds) == ROUNDS
        self._turns.pass_on(self._mine, last)
        if not last:
            self._turns.wait(self._mine)
            torch.set_num_threads(self._threads)  # another way had its own
            self._started = time.perf_counter()

    def finish(self, result: pluribus.Result) -> None:
        pass


def run(watch: Stopwatch, turns: Turns, mine: int, **how: int) -> None:
    turns.wait(mine)
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
            observers=[watch],
            **how,
        )


def measure() -> dict[str, list[float]]:
    """Seconds of every round, by way."""
    turns = Turns(len(WAYS))
    watches = [Stopwatch(turns, mine, how["threads"]) for mine, how in enumerate(WAYS.values())]
    threads = [
        threading.Thread(target=run, args=(watch, turns, mine), kwargs=how)
        for mine, (watch, how) in enumerate(zip(watches, WAYS.values(), strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {way: watch.seconds for way, watch in zip(WAYS, watches, strict=True)}


def row(way: str, seconds: list[float], base: list[float]) -> dict[str, Any]:
    """What the rounds of a way come to, compared with another's, each round with the one of the same turn."""
    ratios = [other / own for other, own in zip(base[1:-1], seconds[1:-1], strict=True)]
    return {
        "way": way,
        "first_round_s": round(seconds[0], 2),
        "round_s": round(statistics.median(seconds[1:-1]), 2),
        "last_round_s": round(seconds[-1], 2),
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
        print(("  {way:26} " + times + "   {times_faster:.2f} x").format(**one))


if __name__ == "__main__":
    main()

"""Time and memory of a round with 10 participants out of 100, 1,000 and 10,000 clients.

    python benchmarks/scale.py [--json]

Every client holds 20 images of 8x8. Each size runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARTICIPANTS, ROWS_EACH, ROUNDS = 10, 20, 30
SIZES = (100, 1_000, 10_000)


def measure(clients: int) -> dict[str, Any]:
    import torch

    import pluribus

    @pluribus.register_data("scale-digits", "random 8 x 8 images")
    def images() -> pluribus.Dataset:
        rows = clients * ROWS_EACH
        x = torch.randint(0, 256, (rows, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        return pluribus.Dataset("scale-digits", x, torch.arange(rows) % 10, tuple("0123456789"))

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        result = pluribus.run(
            "fedgh",
            data="scale-digits",
            partition="iid",
            clients=clients,
            participation=PARTICIPANTS / clients,
            rounds=ROUNDS,
            evaluate="participants",
            checkpoint_every=1,
            out=out,
            progress=False,
        )
        disk = sum(f.stat().st_size for f in Path(out).rglob("*") if f.is_file())
    wall = time.perf_counter() - started
    rounds = [record["seconds"] for record in result.history]
    return {
        "clients": clients,
        "round_ms": round(1000 * statistics.median(rounds[5:]), 1),
        "whole_run_s": round(wall, 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "folder_mb": round(disk / 1e6, 1),
    }


def main() -> None:
    if "--one" in sys.argv:
        print(json.dumps(measure(int(sys.argv[-1]))))
        return
    rows = []
    for clients in SIZES:
        command = [sys.executable, __file__, "--one", str(clients)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
    Path(__file__).with_name("results").joinpath("scale.json").write_text(json.dumps(rows, indent=1) + "\n")
    if "--json" in sys.argv:
        print(json.dumps(rows))
        return
    print(f"fedgh, {PARTICIPANTS} participants a round with {ROWS_EACH} rows each, {ROUNDS} rounds, all checkpointed")
    line = (
        "{clients:>8} clients {round_ms:>7} ms a round {whole_run_s:>6} s in all {peak_mb:>5} MB  folder {folder_mb} MB"
    )
    for row in rows:
        print(line.format(**row))


if __name__ == "__main__":
    main()

"""What recorded steps, streams, stacks and options gain on one GPU.

    python benchmarks/gpu.py [--json] [WORKLOAD ...]

All workloads are timed in this one process. The first: FedGH, HtFE8, 20 clients of 450 training and 150 test images of
32 x 32, batch size 10, one local epoch, evaluation of all clients in both views after every round. A round is the
median over those in which nothing is recorded any more.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import pluribus

IMAGES_EACH = 600  # 450 to train on, 150 to test on


def photos(clients: int) -> pluribus.Dataset:
    rows = clients * IMAGES_EACH
    x = torch.randint(0, 256, (rows, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return pluribus.Dataset(f"photos-{clients}", x, torch.arange(rows) % 10, tuple("0123456789"))


pluribus.register_data("photos-20", "random 32 x 32 photos")(lambda: photos(20))
pluribus.register_data("photos-100", "random 32 x 32 photos")(lambda: photos(100))

HTFE8 = {"data": "photos-20", "clients": 20, "models": "htfe8"}
SMALL = {"data": "photos-100", "clients": 100, "models": "fedgh-cnn5"}
WORKLOADS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("HtFE8, captured", "fedgh", 8, HTFE8),
    ("HtFE8, as written", "fedgh", 3, HTFE8 | {"capture": False}),
    ("HtFE8, channels first", "fedgh", 6, HTFE8 | {"channels_last": False}),
    ("HtFE8, float32 without TF32", "fedgh", 6, HTFE8 | {"precision": "float32"}),
    ("HtFE8, bfloat16", "fedgh", 6, HTFE8 | {"precision": "bfloat16"}),
    ("HtFE8, FedL2G-f", "fedl2g-f", 8, HTFE8 | {"warmup": 0}),
    ("100 x CNN-5, stacked", "fedgh", 8, SMALL),
    ("100 x CNN-5, captured", "fedgh", 6, SMALL | {"stack": False}),
    ("100 x CNN-5, training alone, stacked", "local", 8, SMALL | {"evaluate_every": 1000}),
]


def measure(label: str, method: str, rounds: int, settings: dict[str, Any]) -> dict[str, Any]:
    torch.cuda.empty_cache()
    common = {"partition": "iid", "val_fraction": 0.0, "test_fraction": 0.25, "batch_size": 10, "seed": 0}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/run"
        result = pluribus.run(method, device="cuda", rounds=rounds, out=out, progress=False, **common, **settings)
    settled = result.history[3:-1] if rounds > 3 else result.history[1:]
    return {"workload": label, "round_s": round(statistics.median(r["seconds"] for r in settled), 3)}


def main() -> None:
    wanted = [word for word in sys.argv[1:] if not word.startswith("-")]
    chosen = [workload for workload in WORKLOADS if not wanted or workload[0] in wanted]
    hardware = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    facts: dict[str, Any] = {"command": "python benchmarks/gpu.py", **hardware, "rows": []}
    for workload in chosen:
        row = measure(*workload)
        facts["rows"].append(row)
        print("{workload:38} round {round_s:7.3f} s".format(**row), file=sys.stderr, flush=True)
    if "--json" in sys.argv:
        print(json.dumps(facts))
    else:
        Path(__file__).with_name("results").joinpath("gpu.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

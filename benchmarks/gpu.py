"""What a round costs on one GPU: from the first second on, with every method for mixed models, and with many clients.

    python benchmarks/gpu.py [--json] [WORKLOAD ...]

All workloads are timed in this one process. The first ones: HtFE8, 20 clients of 450 training and 150 test images of
32 x 32, batch size 10, learning rate 0.01, one local epoch, evaluation of all clients in every view after every round,
in memory. `first_s` is the time from the call of `pluribus.run` to the end of its first round. `round_s` is the median
over the rounds in which nothing is recorded any more. `run_s` is the time of the whole run of `rounds`, with what is
saved at its end. `peak_gb` is the largest memory of tensors on the GPU. Workloads whose name begins with `method`
differ in the method alone.

HtFLlib at commit e959261, November 2026, same clients on one H200, seconds a round: FedGH 41.5, FedL2G-f 37.5, FML
42.6, FedProto 31.2, FedKD 54.1.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as a run sets it, but CUDA starts before the first run

import torch

import pluribus
from pluribus.method import Need, methods, takes_one_model

IMAGES_EACH = 600  # 450 to train on, 150 to test on


def photos(clients: int, each: int = IMAGES_EACH) -> pluribus.Dataset:
    rows = clients * each
    x = torch.randint(0, 256, (rows, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return pluribus.Dataset(f"photos-{clients}", x, torch.arange(rows) % 10, tuple("0123456789"))


pluribus.register_data("photos-20", "random 32 x 32 photos")(lambda: photos(20))
pluribus.register_data("photos-100", "random 32 x 32 photos")(lambda: photos(100))
pluribus.register_data("photos-1000", "random 32 x 32 photos")(lambda: photos(1000, 60))

HTFE8 = {"data": "photos-20", "clients": 20, "models": "htfe8"}
SMALL = {"data": "photos-100", "clients": 100, "models": "fedgh-cnn5"}
MANY = {"data": "photos-1000", "clients": 1000, "models": "resnet18", "participation": 0.05}


def mixed() -> list[tuple[str, str, int, dict[str, Any]]]:
    """Every method for mixed models that starts from random weights."""
    rows = []
    for name, cls in methods().items():
        if takes_one_model(cls) or Need.PRETRAINED in cls.needs or name == "fedgh":
            continue
        more: dict[str, Any] = {"public_fraction": 0.1} if Need.PUBLIC_DATA in cls.needs else {}
        more |= {"warmup": 0} if name.startswith("fedl2g") else {}
        rows.append((f"method {name}", name, 5, HTFE8 | more))
    return rows


WORKLOADS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("HtFE8, FedGH", "fedgh", 12, HTFE8),
    ("HtFE8, FedGH, again in the same process", "fedgh", 5, HTFE8),
    ("HtFE8, as written", "fedgh", 2, HTFE8 | {"capture": False}),
    ("HtFE8, channels first", "fedgh", 6, HTFE8 | {"channels_last": False}),
    ("HtFE8, float32 without TF32", "fedgh", 6, HTFE8 | {"precision": "float32"}),
    ("HtFE8, bfloat16", "fedgh", 6, HTFE8 | {"precision": "bfloat16"}),
    ("1,000 x ResNet-18, 50 a round", "fedgh", 7, MANY),
    ("100 x CNN-5, stacked", "fedgh", 8, SMALL),
    ("100 x CNN-5, captured", "fedgh", 6, SMALL | {"stack": False}),
    ("100 x CNN-5, training alone, stacked", "local", 8, SMALL | {"evaluate_every": 1000}),
    *mixed(),
]


class Watch:
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.first = 0.0
        self._started = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    def round(self, record: Any, ledger: Any) -> None:
        self.first = self.first or self.elapsed()


def measure(label: str, method: str, rounds: int, settings: dict[str, Any]) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    common = {"partition": "iid", "val_fraction": 0.0, "test_fraction": 0.25, "batch_size": 10, "lr": 0.01, "seed": 0}
    watch = Watch()
    result = pluribus.run(method, device="cuda", rounds=rounds, progress=False, observers=[watch], **common, **settings)
    whole = watch.elapsed()
    settled = result.history[3:-1] if rounds > 4 else result.history[1:]
    middle = statistics.median(record["seconds"] for record in settled)
    peak = torch.cuda.max_memory_allocated() / 2**30
    times = {"first_s": round(watch.first, 1), "round_s": round(middle, 3), "rounds": rounds, "run_s": round(whole, 1)}
    return {"workload": label, **times, "peak_gb": round(peak, 1)}


def main() -> None:
    wanted = [word for word in sys.argv[1:] if not word.startswith("-")]
    chosen = [workload for workload in WORKLOADS if not wanted or workload[0].startswith(tuple(wanted))]
    hardware = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    facts: dict[str, Any] = {"command": "python benchmarks/gpu.py", **hardware, "rows": []}
    for workload in chosen:
        row = measure(*workload)
        facts["rows"].append(row)
        text = (
            "{workload:40} first {first_s:4.1f} s  round {round_s:6.3f} s  run {run_s:5.1f} s  peak {peak_gb:4.1f} GB"
        )
        print(text.format(**row), file=sys.stderr, flush=True)
    if "--json" in sys.argv:
        print(json.dumps(facts))
    else:
        Path(__file__).with_name("results").joinpath("gpu.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a private training step costs: clipped gradients of single rows and noise, against the plain step.

    python benchmarks/privacy.py [--json] [FOLDER]

Both are steps of one client of `local`, whose rounds only train, on random images of 3 x 32 x 32 with batches of 32. On
a GPU both are recorded and replayed. A private batch is a Poisson sample with a mean of 32 rows. A time is the median
over rounds, and a private round includes the draws of its batches and the accountant.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import pluribus
from pluribus.data.dataset import Dataset

GPU = torch.cuda.is_available()
ROWS, BATCH, ROUNDS = (16_384, 32, 7) if GPU else (512, 32, 5)
MODELS = ("cnn4", "resnet18-gn")
NAMES = tuple("0123456789")


def images() -> Dataset:
    x = torch.randint(0, 256, (ROWS, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Dataset("images", x, torch.arange(ROWS) % len(NAMES), NAMES)


def seconds_of_step(dataset: Dataset, model: str, **more: Any) -> float:
    """Seconds of a step in the rounds of a run, without those in which steps are recorded."""
    fractions = {"val_fraction": 0.0, "test_fraction": 0.05, "partition": "iid", "clients": 1}
    how = {"data": dataset, "models": model, "batch_size": BATCH, "lr": 0.001, "rounds": ROUNDS, "workers": 1}
    result = pluribus.run("local", **fractions, **how, evaluate_every=1000, progress=False, **more)
    assert not [one for one in result.warnings if "captured" in one], result.warnings
    return statistics.median(record["seconds"] / record["steps"]["0"] for record in result.history[2:-1])


def measure(dataset: Dataset, model: str) -> dict[str, Any]:
    plain = seconds_of_step(dataset, model)
    private = seconds_of_step(dataset, model, dp_epsilon=8.0)
    print(f"{model}: {private / plain:.2f} times a plain step", file=sys.stderr, flush=True)
    times = {"plain_us": round(plain * 1e6, 2), "private_us": round(private * 1e6, 2)}
    return {"model": model, **times, "ratio": round(private / plain, 2)}


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--json"]
    where = torch.cuda.get_device_name() if GPU else f"{torch.get_num_threads()} CPU threads"
    facts: dict[str, Any] = {"command": "python benchmarks/privacy.py", "hardware": where}
    facts |= {"torch": torch.__version__, "python": platform.python_version()}
    dataset = images()
    found = facts | {"rows": [measure(dataset, model) for model in MODELS]}
    if "--json" in sys.argv:
        print(json.dumps(found))
    if words:
        Path(words[0]).joinpath("privacy.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a training step on signals, tokens and tables costs on one GPU, against the same step without the library.

    python benchmarks/kinds.py [FOLDER]

A bare step is written by hand for the same model and batch: one CUDA graph that gathers the rows of a batch, runs the
model forward and backward, and takes a step of SGD, with the kernels that a run uses. Ours is one client of `local`,
whose rounds only train. The rows of each kind are random. All steps are timed in this one process; a time is the median
over rounds.

The last rows train a CNN on images that stay on the GPU, and on the same images kept on the host (`--store host`).
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import pluribus
from pluribus.assembly import assemble
from pluribus.data.dataset import Dataset
from pluribus.experiment import experiment
from pluribus.internal.arithmetic import reproducible

ROWS, BATCH, CLASSES, ROUNDS = 16_384, 32, 10, 7
NAMES = tuple("0123456789")


def signals() -> Dataset:
    x = torch.randn(ROWS, 9, 128, generator=torch.Generator().manual_seed(0))
    return Dataset("signals", x, torch.arange(ROWS) % CLASSES, NAMES, kind="signal")


def tokens() -> Dataset:
    x = torch.randint(2, 8192, (ROWS, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return Dataset("tokens", x, torch.arange(ROWS) % CLASSES, NAMES, kind="tokens", vocabulary=8192)


def table() -> Dataset:
    x = torch.randn(ROWS, 30, generator=torch.Generator().manual_seed(0))
    return Dataset("table", x, torch.arange(ROWS) % CLASSES, NAMES, kind="table")


def photos() -> Dataset:
    x = torch.randint(0, 256, (ROWS, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Dataset("photos", x, torch.arange(ROWS) % CLASSES, NAMES)


WORKLOADS: list[tuple[Dataset, str]] = [
    (signals(), "cnn1d-3"),
    (signals(), "resnet1d"),
    (signals(), "gru1d"),
    (tokens(), "fasttext"),
    (tokens(), "textcnn"),
    (tokens(), "texttransformer-2"),
    (table(), "table-mlp-2"),
    (table(), "ft-transformer"),
]


def settings(dataset: Dataset, model: str) -> dict[str, Any]:
    fractions = {"val_fraction": 0.0, "test_fraction": 0.05, "partition": "iid", "clients": 1}
    return fractions | {"data": dataset, "models": model, "batch_size": BATCH, "device": "cuda", "lr": 0.001}


def our_step(dataset: Dataset, model: str, **more: Any) -> float:
    """Seconds of a step in the rounds of a run, without those in which steps are recorded."""
    how = settings(dataset, model) | {"rounds": ROUNDS, "evaluate_every": 1000, "progress": False} | more
    result = pluribus.run("local", **how)
    assert not [one for one in result.warnings if "captured" in one], result.warnings
    return statistics.median(record["seconds"] / record["steps"]["0"] for record in result.history[3:-1])


def bare_step(dataset: Dataset, model: str) -> float:
    """Seconds of a step that is recorded by hand."""
    parts = assemble(experiment("local", **settings(dataset, model)))
    net = parts.task.start(model, 0).cuda().train()
    train = parts.data.sets(0)["train"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, fused=True)
    rows = torch.zeros(BATCH, dtype=torch.int64, device="cuda")

    def step() -> None:
        x, y = train.store.take(rows, scale=train.scale)
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(ROUNDS):
        order = train.rows[torch.randperm(len(train)).cuda()]
        torch.cuda.synchronize()
        started = time.perf_counter()
        batches = order.split(BATCH)[:-1]
        for batch in batches:
            rows.copy_(batch)
            graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / len(batches))
    return statistics.median(times[3:])


def measure(dataset: Dataset, model: str) -> dict[str, Any]:
    with reproducible(None, "tf32"):  # the kernels that a run uses
        bare = bare_step(dataset, model)
    ours = our_step(dataset, model)
    return {"kind": dataset.kind, "model": model, "bare_us": bare * 1e6, "ours_us": ours * 1e6, "ratio": ours / bare}


def measure_stores() -> Iterator[dict[str, Any]]:
    """The same images on the GPU and on the host."""
    dataset = photos()
    for model in ("cnn4", "resnet18"):
        device, host = (our_step(dataset, model, store=where) for where in ("device", "host"))
        yield {"model": model, "device_us": device * 1e6, "host_us": host * 1e6, "ratio": host / device}


def main() -> None:
    hardware = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    facts: dict[str, Any] = {"command": "python benchmarks/kinds.py", **hardware}
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("results")
    for name, rows in {"kinds": map(measure, *zip(*WORKLOADS, strict=True)), "stores": measure_stores()}.items():
        text = json.dumps(facts | {"rows": [_tell(row) for row in rows]}, indent=1)
        folder.joinpath(f"{name}.json").write_text(text + "\n")


def _tell(row: dict[str, Any]) -> dict[str, Any]:
    rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
    print("  ".join(f"{key} {value}" for key, value in rounded.items()), file=sys.stderr, flush=True)
    return rounded


if __name__ == "__main__":
    main()

"""How long a search for the noise of a client takes, against one that tries every order of the accountant.

    python benchmarks/noise.py [--json] [FOLDER]

Both find the same noise for epsilon 8 and delta 1e-5. Nothing is kept from one search to the next. A time is the median
of five searches.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pluribus.privacy import accountant
from pluribus.privacy.accountant import Spend, find_noise

PLANS = ((0.05, 100), (0.1, 40), (0.3, 20), (0.03, 1000))  # sampling rate, steps
SEARCHES = 5


def tries_every_order(epsilon: float, spends: list[Spend], delta: float) -> bool:
    orders = (*accountant._whole_orders(), *accountant.BETWEEN)
    return accountant._epsilon(accountant._total(spends, orders), orders, delta) <= epsilon


def search(rate: float, steps: int) -> tuple[float, float]:
    """The noise, and the median of the seconds."""
    noise, seconds = 0.0, []
    for _ in range(SEARCHES):
        accountant._divergence.cache_clear()
        started = time.perf_counter()
        noise = find_noise(8.0, 1e-5, lambda noise: [Spend(noise, rate, steps)])
        seconds.append(time.perf_counter() - started)
    return noise, statistics.median(seconds)


def measure(rate: float, steps: int) -> dict[str, Any]:
    noise, ours = search(rate, steps)
    usual, accountant.costs_at_most = accountant.costs_at_most, tries_every_order
    same, every = search(rate, steps)
    accountant.costs_at_most = usual
    assert same == noise
    times = {"every_order_ms": round(1000 * every), "ours_ms": round(1000 * ours)}
    return {"sampling_rate": rate, "steps": steps, "noise": round(noise, 4), **times, "ratio": round(every / ours, 1)}


def main() -> None:
    accountant.require_accountant()  # its import takes a second
    words = [word for word in sys.argv[1:] if word != "--json"]
    facts: dict[str, Any] = {"command": "python benchmarks/noise.py", "hardware": "1 CPU thread"}
    facts |= {"torch": torch.__version__, "python": platform.python_version()}
    found = facts | {"rows": [measure(*plan) for plan in PLANS]}
    print(json.dumps(found, indent=None if "--json" in sys.argv else 1))
    if words:
        Path(words[0]).joinpath("noise.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

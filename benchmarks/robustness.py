"""How well attacks work, and how well defenses help: mean accuracy of honest clients on digits.

Five methods, four attacks and none, three defenses and none, three seeds. Every run is kept in
results/robustness.json, so that a stopped script can be resumed. It prints the table of docs/robustness.md.

    python benchmarks/robustness.py
"""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from statistics import fmean

import pluribus
from pluribus.internal.attacks import ATTACKERS, choose_attackers
from pluribus.study.significance import Difference, difference, holm

FILE = Path(__file__).parent / "results" / "robustness.json"
METHODS = ("fedavg", "fedkd", "fedgh", "fedproto", "fedtgp")
ATTACKS = ("none", "label-flip", "sign-flip", "scale", "noise")
DEFENSES = ("none", "median", "clip", "krum")
SEEDS = range(3)
CLIENTS = 10
SETTINGS = {
    "clients": CLIENTS,
    "rounds": 15,
    "lr": 0.05,
    "models": "mlp-64",
    "threads": 1,
    "workers": 1,
    "device": "cpu",
}
HYPER = {"fedtgp": {"server_epochs": 10}}

Accuracies = dict[int, float]  # by client


def run(method: str, attack: str, defense: str, seed: int) -> Accuracies:
    """The selected test accuracy of each honest client."""
    settings = SETTINGS | HYPER.get(method, {}) | {"attack": attack, "defense": defense, "seed": seed}
    result = pluribus.run(method, progress=False, **settings)
    liars = choose_attackers(CLIENTS, ATTACKERS, seed)  # without an attack, the same clients are counted
    found = {k: one.selected["test"] for k, one in result.per_client().items() if k not in liars}
    return {k: value for k, value in found.items() if value is not None}


def load() -> dict[str, Accuracies]:
    """The runs so far."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {name: {int(k): value for k, value in one.items()} for name, one in known.items()}


def key(method: str, attack: str, defense: str, seed: int) -> str:
    return f"{method} {attack} {defense} {seed}"


def run_all() -> dict[str, Accuracies]:
    """Run what is missing."""
    runs, started = load(), time.perf_counter()
    for one in product(METHODS, ATTACKS, DEFENSES, SEEDS):
        if key(*one) not in runs:
            runs[key(*one)] = run(*one)
            FILE.write_text(json.dumps(runs, indent=0) + "\n")
    print(f"{time.perf_counter() - started:.0f} s")
    return runs


def compare(runs: dict[str, Accuracies], method: str, attack: str, defense: str) -> Difference:
    """A defense minus none, client by client."""
    pairs = [(runs[key(method, attack, defense, s)], runs[key(method, attack, "none", s)]) for s in SEEDS]
    return difference([[ours[k] - theirs[k] for k in ours] for ours, theirs in pairs])


def main() -> None:
    """Run everything, and print the table."""
    runs = run_all()
    tests = list(product(METHODS, ATTACKS, DEFENSES[1:]))
    found = [compare(runs, *one) for one in tests]
    verdicts = dict(zip(tests, zip(found, holm([one.p for one in found]), strict=True), strict=True))
    print("| method | attack | " + " | ".join(DEFENSES) + " |")
    print("|---|---|" + "---|" * len(DEFENSES))
    for method, attack in product(METHODS, ATTACKS):
        cells = []
        for defense in DEFENSES:
            mean = fmean(fmean(runs[key(method, attack, defense, s)].values()) for s in SEEDS)
            mark = ""
            if defense != "none":
                one, p = verdicts[method, attack, defense]
                mark = {"better": " ↑", "worse": " ↓"}.get(one.verdict(p), "")
            cells.append(f"{100 * mean:.1f}{mark}")
        print(f"| {method} | {attack} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

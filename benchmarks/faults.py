"""Seconds that a killed or frozen process costs a federation of two real sites on this machine.

    python benchmarks/faults.py [north:flwr-clientapp:KILL ...]

FedGH with mlp-64, rounds without evaluation, a deadline of 600 s. A fault strikes in the middle of a round: at a site,
while its worker is frozen and a ClientApp waits for it; at the server, a second after a round has begun. Lost is what
the round takes longer than the one before. A frozen process goes on when the round has ended, or after two minutes.
Other Python programs on the machine make these numbers larger.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from conftest import few_digits  # noqa: E402
from network import Network  # noqa: E402
from pluribus.assembly import assemble  # noqa: E402
from pluribus.experiment import experiment  # noqa: E402

NAMES = {0: "north", 1: "south"}
WORKER, CLIENT, ROUNDS, MOST = "pluribus-site", "flwr-clientapp", 200, 120.0
FAULTS = (
    "north:flwr-clientapp:KILL",
    "north:flwr-clientapp:TERM",
    "north:flower-superexec:KILL",
    "north:pluribus-forks:KILL",
    "north:pluribus-site:KILL",
    "north:flower-supernode:TERM",
    "server:flwr-serverapp:KILL",
    "server:flower-superexec:KILL",
    "server:pluribus-forks:KILL",
    "server:flower-superlink:KILL",
    "server:pluribus-gate:KILL",
    "north:flower-supernode:KILL",
    "north:flwr-clientapp:STOP",
    "server:flower-superlink:STOP",
    "north:flower-supernode:STOP",
)


def strike(network: Network, where: str, called: str, number: signal.Signals) -> str:
    """One fault. Returns what it has cost."""
    before = len(network.rounds())
    network.until(lambda: len(network.rounds()) > before + 1)  # a whole round without a fault
    t, usual = len(network.rounds()), network.rounds()[-1]["seconds"]
    if where == "server":
        time.sleep(1)
    else:
        network.signal(where, WORKER, signal.SIGSTOP)
        network.until(lambda: network.process(where, CLIENT))
    pid, end = network.process(where, called), time.monotonic() + MOST
    assert pid is not None
    os.kill(pid, number)
    if where != "server" and called != WORKER:
        network.signal(where, WORKER, signal.SIGCONT)
    while len(network.rounds()) <= t and time.monotonic() < end:
        time.sleep(0.2)
    went_on = len(network.rounds()) > t
    if number == signal.SIGSTOP:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    network.until(lambda: len(network.rounds()) > t)
    record = network.rounds()[t]
    frozen = "" if went_on else f", after {MOST:.0f} s frozen"
    return f"lost {record['seconds'] - usual:.1f} s{frozen}, {record['answered']} of 2 answered"


def main(faults: list[str]) -> None:
    """Print a line per fault."""
    settings = {"data": few_digits(160), "val_fraction": 0.1, "test_fraction": 0.2, "models": "mlp-64", "threads": 1}
    parts = assemble(experiment("fedgh", clients=2, rounds=ROUNDS, **settings))
    network = Network(Path(tempfile.mkdtemp(prefix="faults-")), parts, NAMES)
    shape = {"classes": list(parts.task.names), "image": list(parts.task.shape)}
    config = network.write_server(rounds=ROUNDS, evaluate_every=ROUNDS, **shape | {"deadline": 600.0})
    with contextlib.closing(network):
        network.pluribus("server", "serve", "fedgh", "--config", config)
        network.until(lambda: "listening on" in network.said("server"))
        for name in NAMES.values():
            network.join(name)
        for fault in faults:
            where, called, number = fault.split(":")
            print(f"{fault:32} {strike(network, where, called, signal.Signals[f'SIG{number}'])}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAULTS))

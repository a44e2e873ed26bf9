"""Worker processes: the same bits as one after the other, whoever works where, and whoever is killed meanwhile."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pluribus
from conftest import assemble_tiny, few_digits, new_folder, run_tiny
from kit import StopAfter, StoppedError, assert_same
from places import Broken, Look
from pluribus.conformance.kinds import SAMPLES
from pluribus.engines import engine_for
from pluribus.engines import workers as workers_module
from pluribus.engines.assignment import Costs, Size, assign, limit_of, longest
from pluribus.engines.serial import Serial
from pluribus.engines.workers import Workers
from pluribus.errors import ConflictError, NotFiniteError, WorkerError
from pluribus.host import Limits
from pluribus.method import name_of
from pluribus.result import Result
from processes import Process, start
from refusals import assert_facts, refused
from toys import Consensus, Counted

TWO = {"workers": 2, "threads": 1}
PATIENCE = 60  # seconds to wait for what must happen; only a test that fails waits so long


# ---- the same bits -------------------------------------------------------------------------------------------------

FEW = {"data": few_digits(160), "checkpoint_every": 1, "threads": 1}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "a prototype method": ("fedgh", {}),
    "gradients of gradients": ("fedl2g-f", {}),
    "peers": ("fedh2l", {"partition": "dirichlet", "public_fraction": 0.2}),
    "two exchanges": ("fedfree", {"momentum": 0.9}),
    "batch norm and momentum": ("fedavg", {"models": "toys.normed", "momentum": 0.9}),
    "enrolment": (name_of(Counted), {"participation": 0.5, "rounds": 3}),
    "some absent, some late": (
        "fedgh",
        {
            "clients": 6,
            "rounds": 4,
            "participation": 0.5,
            "drop_rate": 0.2,
            "straggler_rate": 0.3,
            "augment": "crop,flip",
        },
    ),
    "slots that outlive an exchange": (name_of(Consensus), {"optimizer": "adam", "lr": 0.001}),
    "slots that outlive a round": ("fedavg", {"models": "mlp-64", "momentum": 0.9, "optimizer_life": "run"}),
}


def of_kind(name: str, same_model: bool = False) -> dict[str, Any]:
    """Settings for rows that are no images."""
    (sample,) = (one for one in SAMPLES if one.name == name)
    return sample.settings_for(same_model) | {"clients": 3}


RUNS |= {
    "signals of natural clients": ("fedh2l", of_kind("signals") | {"public_fraction": 0.2, "augment": "jitter"}),
    "tokens": ("scaffold", of_kind("tokens", same_model=True)),
    "numbers, and tables by own scale": ("fedkd", of_kind("numbers to predict")),
    "labels": ("fml", of_kind("several labels") | {"class_weights": "balanced"}),
}


def run(name: str, **settings: Any) -> Result:
    method, own = RUNS[name]
    return run_tiny(method, **FEW | own | settings)


@cache
def serial(name: str) -> Result:
    return run(name)


@pytest.mark.parametrize("name", list(RUNS)[4:])  # test_transports.py has the first four
def test_the_same_bits_as_one_after_the_other(name: str) -> None:
    assert_same(serial(name), run(name, workers=2))


@pytest.mark.parametrize("name", ["slots that outlive an exchange"])
def test_the_same_bits_with_room_for_one_client_per_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 2)
    monkeypatch.setattr("pluribus.host.MOST_BYTES", 0)  # what is saved is forgotten, and asked back from the parent
    assert_same(serial(name), run(name, workers=2))


@pytest.mark.parametrize("name", ["slots that outlive an exchange", "peers"])
def test_the_same_bits_when_everyone_moves_all_the_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = []
    turn = itertools.count()

    def restless(costs: Mapping[int, float], owner: Mapping[int, int], workers: int) -> dict[int, int]:
        now = next(turn)
        plan = {k: (k + now) % workers for k in costs}
        moves.extend(k for k in plan if k in owner and owner[k] != plan[k])
        return plan

    monkeypatch.setattr("pluribus.engines.spread.assign", restless)
    moved = run(name, workers=2, checkpoint_every=2)
    assert moves
    assert_same(serial(name), moved)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_resumed_with_another_number_of_workers(first: int, then: int, tmp_path: Path) -> None:
    name, out = "some absent, some late", tmp_path / "run"
    method, own = RUNS[name]
    settings = FEW | own | {"clients": 6, "lr": 0.05, "device": "cpu", "out": str(out), "workers": first}
    with pytest.raises(StoppedError):
        pluribus.run(method, progress=False, observers=[StopAfter(1)], **settings)
    config = out / "config.toml"
    config.write_text(config.read_text().replace(f"workers = {first}", f"workers = {then}"))
    assert_same(serial(name), pluribus.resume(out, progress=False))


# ---- what a worker is ----------------------------------------------------------------------------------------------


class Census:
    """Someone who counts the processes of a run."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def start(self, federation: Any) -> None: ...

    def round(self, record: Any, ledger: Any) -> None:
        self.alive.append(len(multiprocessing.active_children()))

    def finish(self, result: Any) -> None: ...


def look(**settings: Any) -> tuple[list[list[int]], Census]:
    census = Census()
    settings = FEW | {"clients": 4, "rounds": 1, "device": "cpu", "out": new_folder()} | settings
    result = pluribus.run(Look, progress=False, observers=[census], **settings)
    return [*zip(*result.history[0]["notes"]["facts"].values(), strict=True)], census


def test_workers_have_their_own_threads_and_share_the_data() -> None:
    (pids, threads, interop, shared), census = look(workers=2, threads=2)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    assert (set(threads), set(interop), set(shared)) == ({2}, {1}, {True})
    assert census.alive == [2]
    assert multiprocessing.active_children() == []


def test_no_more_workers_than_clients() -> None:
    (pids, *_), census = look(workers=5, clients=3)
    assert len(set(pids)) == 3
    assert census.alive == [3]


def test_one_worker_is_this_process() -> None:
    (pids, *_), census = look(workers=1)
    assert set(pids) == {os.getpid()}
    assert census.alive == [0]
    assert isinstance(
        engine_for(assemble_tiny(workers=3, clients=1, models="mlp-64"), lambda k: None, pytest.fail), Serial
    )


def test_limits_hold_for_all_workers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 7)
    monkeypatch.setattr("pluribus.host.MOST_BYTES", 1000)
    cpu = torch.device("cpu")
    assert [tuple(Limits.of(cpu, sites)) for sites in (1, 3, 10)] == [
        (7, 1000, 625),
        (2, 333, 208),
        (1, 100, 62),
    ]
    host = Workers(assemble_tiny(), lambda k: None, 3)._host_factory()(load=lambda k: None)
    assert host._limits == Limits(2, 333, 208)


def test_workers_are_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for device in ("cuda", "auto"):
        with refused(ConflictError, "--workers", "--device cpu"):
            assemble_tiny(workers=2, device=device)


def test_a_finished_run_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = run("a prototype method", workers=2)
    monkeypatch.setattr(workers_module, "Worker", None)
    assert pluribus.resume(finished.folder, progress=False).history == finished.history


# ---- when something goes wrong -------------------------------------------------------------------------------------


def test_an_error_in_a_worker_is_raised_here_the_first_in_order_of_clients() -> None:
    with pytest.raises(ValueError, match=r"^one is odd") as caught:
        run_tiny(Broken(), **TWO)
    place, note = caught.value.__notes__
    assert place.startswith("round 0, client 1 (places.py, line ")
    assert "In a worker process" in note
    assert "local_update" in note
    assert multiprocessing.active_children() == []


def test_an_error_that_cannot_travel_comes_as_text() -> None:
    with pytest.raises(RuntimeError, match=r"^StrangeError: 1 and 2") as caught:
        run_tiny(Broken("strange"), **TWO)
    assert "local_update" in caught.value.__notes__[0]


def test_a_method_that_exits_ends_the_run_as_it_would_without_workers() -> None:
    with pytest.raises(SystemExit) as caught:
        run_tiny(Broken("exit"), **TWO)
    assert caught.value.code == 3


def test_a_sentence_from_a_worker_is_the_same_sentence() -> None:
    sentences = []
    for how in ({"threads": 1}, TWO):
        with pytest.raises(NotFiniteError) as caught:
            run_tiny("fedgh", lr=1e20, **how)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]


class Killer:
    """Someone who kills a worker after the first round."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def start(self, federation: Any) -> None: ...

    def round(self, record: Any, ledger: Any) -> None:
        if record["round"] == 0:
            self.pid = multiprocessing.active_children()[-1].pid
            os.kill(self.pid, self.number)

    def finish(self, result: Any) -> None: ...


@pytest.mark.parametrize(
    ("number", "facts"), [(signal.SIGKILL, ["memory", "fewer --workers"]), (signal.SIGTERM, ["SIGTERM"])]
)
def test_a_worker_that_is_killed_is_named_and_the_run_goes_on_later(number: signal.Signals, facts: list[str]) -> None:
    name, out = "a prototype method", new_folder()
    settings = FEW | {"clients": 4, "rounds": 2, "lr": 0.05, "device": "cpu", "out": out, "workers": 2}
    killer = Killer(number)
    with refused(WorkerError, f"pluribus resume {out}", *facts) as caught:
        pluribus.run("fedgh", progress=False, observers=[killer], **settings)
    assert_facts(str(caught.value), "worker", f"process {killer.pid}")
    assert multiprocessing.active_children() == []
    assert_same(serial(name), pluribus.resume(out, progress=False))


def family(pid: int) -> list[int]:
    """The living processes that a process started, and those that they started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # gone meanwhile
            continue
        if state != "Z":
            parents[int(stat.parent.name)] = int(parent)
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def endless(folder: Path) -> tuple[Process, list[int]]:
    """A run with two workers in the middle of its rounds, and the processes that belong to it."""
    command = ["run", "fedgh", "--data", few_digits(), "--out", folder, "--device", "cpu", "--rounds", "100000"]
    process = start(*command, "--workers", "2", "--threads", "1", "--json")
    lines = folder / "metrics.jsonl"
    until(lambda: process.poll() is not None or (lines.exists() and lines.read_text().count("\n") > 1))
    assert process.poll() is None, process.err
    found = family(process.pid)
    assert len(found) >= 3  # two workers and the server that forked them
    return process, found


def test_no_worker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    process, found = endless(tmp_path / "run")
    process.kill()
    until(lambda: not any(alive(pid) for pid in found))
    assert "Traceback" not in process.err


def test_an_interrupt_stops_all_processes_and_says_how_to_go_on(tmp_path: Path) -> None:
    process, found = endless(tmp_path / "run")
    for pid in found:  # a terminal sends it to all, but it is for the parent
        os.kill(pid, signal.SIGINT)
    lines = tmp_path / "run" / "metrics.jsonl"
    rounds = lines.read_text().count("\n")
    until(lambda: process.poll() is not None or lines.read_text().count("\n") > rounds + 2)
    assert process.poll() is None, process.err
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    until(lambda: not any(alive(pid) for pid in found))
    assert_facts(process.err.splitlines()[-1], "stopped", f"pluribus resume {tmp_path / 'run'}")
    assert "Traceback" not in process.err
    assert "Process" not in process.err


# ---- a user's own script -------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn

import pluribus


class Mine(pluribus.Method):
    paper = "mine"

    def local_update(self, client):
        client.fit(self.step)
        return pluribus.Message({})


def flat(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 8))


def noise():
    x = torch.randint(0, 256, (80, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return pluribus.Dataset("noise", x, torch.arange(80) % 2, ("a", "b"))


def main(workers):
    mine = {"data": "__main__.noise", "models": "__main__.flat", "partition": "iid", "clients": 3, "rounds": 2}
    result = pluribus.run(Mine, progress=False, threads=1, workers=workers, device="cpu", **mine)
    print(result.history[-1]["loss"])
"""
CALLS = "main(workers=1)\nmain(workers=2)\n"


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_a_script_brings_its_own_method_model_and_data(tmp_path: Path) -> None:
    ended = run_script(tmp_path, SCRIPT + "\nif __name__ == '__main__':\n" + textwrap.indent(CALLS, "    "))
    assert ended.returncode == 0, ended.stderr
    alone, together = ended.stdout.split()
    assert alone == together


def test_a_script_without_a_guard_gets_one_sentence(tmp_path: Path) -> None:
    ended = run_script(tmp_path, SCRIPT + CALLS)
    assert ended.returncode == 1
    assert len(ended.stdout.split()) == 1  # of the run without workers, here and nowhere else
    assert ended.stderr.count("Traceback") == 1
    assert_facts(ended.stderr.splitlines()[-1], "UserCodeError", "if __name__ == '__main__':", "workers=")


# ---- who works where -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "owner", "workers", "plan"),
    [
        ({}, {}, 2, {}),
        ({5: 1.0}, {5: 1}, 2, {5: 1}),
        # by hand: 5 -> A, 4 -> B, 3 -> B (4 < 5), 3 -> A (5 < 7), 3 -> B (7 < 8): 8 and 10
        ({0: 3.0, 1: 3.0, 2: 3.0, 3: 4.0, 4: 5.0}, {}, 2, {4: 0, 3: 1, 0: 1, 1: 0, 2: 1}),
        # one slow model has a worker for itself
        ({0: 1.0, 1: 1.0, 2: 9.0, 3: 1.0}, {}, 2, {2: 0, 0: 1, 1: 1, 3: 1}),
        # as good as free: everyone stays
        ({0: 3.0, 1: 3.0, 2: 2.0, 3: 2.0, 4: 2.0}, {0: 1, 1: 1, 2: 0, 3: 0, 4: 0}, 2, {0: 1, 1: 1, 2: 0, 3: 0, 4: 0}),
        # 10.5 against 10: not clearly longer, everyone stays
        ({0: 10.5, 1: 9.5}, {0: 0, 1: 1}, 2, {0: 0, 1: 1}),
        ({0: 5.5, 1: 5.0, 2: 5.0, 3: 4.5}, {0: 0, 1: 0, 2: 1, 3: 1}, 2, {0: 0, 1: 0, 2: 1, 3: 1}),
        # 0.08 against 0.04: so little is not worth a move
        ({0: 0.04, 1: 0.04}, {0: 1, 1: 1}, 2, {0: 1, 1: 1}),
        # 4 against 2: two of four stay, two go
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, {0: 1, 1: 1, 2: 1, 3: 1}, 2, {0: 1, 1: 1, 2: 0, 3: 0}),
        # a newcomer goes where there is room
        ({0: 2.0, 1: 2.0, 2: 2.0}, {0: 0, 1: 0}, 2, {0: 0, 1: 0, 2: 1}),
    ],
)
def test_assignment_by_hand(costs: dict[int, float], owner: dict[int, int], workers: int, plan: dict[int, int]) -> None:
    assert assign(costs, owner, workers) == plan


def shortest(costs: list[float], workers: int) -> float:
    """By trying all ways."""
    ways: Iterator[tuple[int, ...]] = itertools.product(range(workers), repeat=len(costs))
    return min(longest(dict(enumerate(costs)), dict(enumerate(way))) for way in ways)


@given(
    costs=st.lists(st.integers(0, 50).map(float), min_size=1, max_size=7),
    owners=st.lists(st.integers(0, 2) | st.none(), min_size=7, max_size=7),
    workers=st.integers(1, 3),
)
def test_everyone_has_one_worker_and_nobody_waits_much_longer_than_must_be(
    costs: list[float], owners: list[int | None], workers: int
) -> None:
    owner = {k: worker for k, worker in enumerate(owners) if worker is not None and worker < workers}
    plan = assign(dict(enumerate(costs)), owner, workers)
    assert list(plan) == list(range(len(costs)))
    assert set(plan.values()) <= set(range(workers))
    bound = 4 / 3 - 1 / (3 * workers)  # Graham's, of the most costly first
    free = longest(dict(enumerate(costs)), assign(dict(enumerate(costs)), {}, workers))
    assert free <= bound * shortest(costs, workers) + 1e-9
    assert longest(dict(enumerate(costs)), plan) <= limit_of(free)


def test_costs_are_measured_or_guessed_by_those_that_are() -> None:
    sizes = {0: Size("mlp", 10), 1: Size("mlp", 30), 2: Size("cnn", 20), 3: Size("vit", 5)}
    costs = Costs(sizes.__getitem__)
    assert costs.of("work", sizes) == {0: 10, 1: 30, 2: 20, 3: 5}
    costs.note("work", 0, 2.0)
    assert costs.of("work", sizes) == {0: 2.0, 1: 6.0, 2: 4.0, 3: 1.0}
    costs.note("work", 2, 12.0)  # now 0.2 per amount of one model and 0.6 of the other: 0.4 for the third
    assert costs.of("work", sizes) == {0: 2.0, 1: 6.0, 2: 12.0, 3: 2.0}
    costs.note("work", 0, 1.0)
    assert costs.of("work", [0, 1]) == {0: 1.0, 1: 3.0}
    assert costs.of("evaluate", [1]) == {1: 30}

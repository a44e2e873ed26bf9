"""Worker processes by default: they start when they save time, change no bit, and never get in the way."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_workers import FEW, PATIENCE, RUNS, Census, Killer, run, serial

import pluribus
from conftest import assemble_tiny, few_digits, new_folder, run_tiny
from kit import StopAfter, StoppedError, assert_same, differing
from places import Look
from pluribus.engines import auto, engine_for
from pluribus.engines.auto import Auto
from pluribus.engines.forecast import Forecast
from pluribus.engines.serial import Serial
from pluribus.engines.workers import Workers
from pluribus.errors import FormatError, RangeError, UnknownNameError, WorkerError
from pluribus.experiment import Experiment, experiment
from pluribus.models import register_model, zoo
from pluribus.request import Evaluate, Work
from pluribus.study.bench import bench
from pluribus.study.plan import common_settings
from refusals import assert_facts, refused
from terminal import Terminal
from toys import normed

MANY = 10.0**9
AT_ONCE = {"LEAST_SECONDS": 0.0, "LEAST_SAVED": -MANY, "PATIENCE": PATIENCE}
RUNS = RUNS | {"prototypes of some": ("fedproto", {"clients": 6, "participation": 0.5, "rounds": 3})}


@pytest.fixture(autouse=True)
def _two_cores() -> Iterator[None]:
    """Torch has two threads here, as on a machine with two cores. In other tests it has one."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes pay after the first request, and the second request waits until they have started."""
    for name, value in AT_ONCE.items():
        monkeypatch.setattr(auto, name, value)


class Later(Census):
    """Someone who lets processes pay from a round on, and counts them."""

    def __init__(self, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._t, self._patch = t, monkeypatch
        monkeypatch.setattr(auto, "LEAST_SAVED", MANY)

    def round(self, record: Any, ledger: Any) -> None:
        super().round(record, ledger)
        if record["round"] == self._t - 1:
            self._patch.setattr(auto, "LEAST_SAVED", -MANY)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(RUNS))
def test_the_same_bits_when_clients_move_in_the_first_round(name: str, at_once: None) -> None:
    method, own = RUNS[name]
    one, census = run_tiny(method, **FEW | own | {"workers": 1}), Census()
    moved = run_tiny(method, **FEW | own | {"workers": "auto"}, observers=[census])
    assert set(census.alive) == {2}
    assert multiprocessing.active_children() == []
    assert_same(one, moved)


@pytest.mark.parametrize("name", ["peers", "slots that outlive an exchange", "numbers, and tables by own scale"])
def test_the_same_bits_when_clients_move_with_state_that_is_not_saved(
    name: str, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(1, monkeypatch)
    moved = run(name, workers="auto", rounds=3, checkpoint_every=3, observers=[later])
    assert later.alive == [0, 2, 2]
    assert_same(run(name, workers=1, rounds=3), moved)


def test_the_same_bits_after_whichever_request_clients_move(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name, few = "slots that outlive an exchange", {"clients": 2, "rounds": 2, "checkpoint_every": 2}
    one = run(name, **few, workers=1)
    for moment in itertools.count(1):
        count = itertools.count(1)
        monkeypatch.setattr(Auto, "_pays", lambda engine: next(count) >= moment)  # noqa: B023  called in this round
        census = Census()
        assert_same(one, run(name, **few, workers="auto", observers=[census]))
        if census.alive[-1] == 0:
            break
    assert moment > 8  # requests: two rounds, two clients, two exchanges and evaluation


def test_the_same_bits_with_room_for_one_client(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 1)
    monkeypatch.setattr("pluribus.host.MOST_BYTES", 0)
    later = Later(1, monkeypatch)
    moved = run("slots that outlive an exchange", workers="auto", rounds=3, observers=[later])
    assert later.alive == [0, 2, 2]
    assert_same(run("slots that outlive an exchange", workers=1, rounds=3), moved)


@pytest.mark.parametrize("moves_in", ["first", "second"])
def test_resumed_before_and_after_clients_move(
    moves_in: str, at_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, out, census = "some absent, some late", tmp_path / "run", Census()
    method, own = RUNS[name]
    settings = FEW | own | {"lr": 0.05, "device": "cpu", "out": str(out), "workers": "auto"}
    monkeypatch.setattr(auto, "LEAST_SAVED", -MANY if moves_in == "first" else MANY)
    with pytest.raises(StoppedError):
        pluribus.run(method, progress=False, observers=[census, StopAfter(1)], **settings)
    monkeypatch.setattr(auto, "LEAST_SAVED", MANY if moves_in == "first" else -MANY)
    assert_same(serial(name), pluribus.resume(out, progress=False, observers=[census]))
    assert census.alive == ([2, 2, 0, 0] if moves_in == "first" else [0, 0, 2, 2])


@pytest.mark.parametrize("request_of", [Work, Evaluate])
def test_both_sides_keep_clients_until_they_are_saved(request_of: type[Work | Evaluate], at_once: None) -> None:
    taken = []
    for workers in (1, "auto"):
        parts = assemble_tiny("fedproto", workers=workers, threads=1)
        with closing(engine_for(parts, lambda k: None, pytest.fail)) as engine:
            assert [k for k, _ in engine.each(request_of(k, 0) for k in (3, 1, 0, 2))] == [3, 1, 0, 2]
            assert engine.pending() == (4 if request_of is Work else 0)
            taken.append((engine.room, engine.take_changed(), engine.take_selected()))
            assert (engine.pending(), engine.take_changed(), engine.take_selected()) == (0, {}, {})
    assert isinstance(engine, Auto)
    assert not engine.host._live  # what is saved takes no memory here
    (room, changed, selected), (room_there, changed_there, selected_there) = taken
    assert room == room_there
    assert list(changed) == list(changed_there) == ([0, 1, 2, 3] if request_of is Work else [])
    assert list(selected) == list(selected_there) == ([0, 1, 2, 3] if request_of is Evaluate else [])
    assert [k for k in changed if differing(changed[k], changed_there[k])] == []
    assert [k for k in selected if differing(selected[k][1], selected_there[k][1])] == []


# ---- when processes start --------------------------------------------------------------------------------------------


def look(**settings: Any) -> tuple[list[list[int]], Census]:
    """Where each client of the last round ran."""
    census = Census()
    settings = FEW | {"clients": 4, "rounds": 1, "device": "cpu", "out": new_folder(), "workers": "auto"} | settings
    result = pluribus.run(Look, progress=False, observers=[census], **settings)
    return [*zip(*result.history[-1]["notes"]["facts"].values(), strict=True)], census


def test_the_rest_of_a_round_runs_in_processes_that_share_the_data(at_once: None) -> None:
    (pids, threads, _, shared), _ = look(threads=1)
    assert pids[0] == os.getpid()
    assert len(set(pids[1:])) == 2
    assert os.getpid() not in pids[1:]
    assert set(threads) == {1}
    assert shared == (0, 1, 1, 1)


def test_public_rows_are_shared_too(at_once: None) -> None:
    (_, _, _, shared), _ = look(threads=1, public_data=few_digits(80))
    assert shared == (0, 1, 1, 1)


@pytest.mark.parametrize("kept", ["LEAST_SECONDS", "LEAST_SAVED"])
def test_a_short_run_starts_no_process(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little is measured, or too little would be saved: each is reason enough."""
    for name, value in AT_ONCE.items():
        if name != kept:
            monkeypatch.setattr(auto, name, value)
    (pids, threads, *_), census = look(rounds=3)
    assert set(pids) == {os.getpid()}
    assert set(threads) == {1}  # as many as with processes, so that the bits are the same
    assert census.alive == [0, 0, 0]


def test_a_run_that_ends_while_processes_start_leaves_none(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "PATIENCE", 0.0)
    (pids, *_), _ = look(threads=1)
    assert pids[0] == os.getpid()
    assert multiprocessing.active_children() == []


def test_the_forecast_by_hand() -> None:
    forecast = Forecast(rounds=10, sampled=4, processes=2)
    for seconds in (1.0, 3.0):
        forecast.note(0, "work", seconds)
    # beside each other 3 instead of 4, so 1 saved; 2 in a round of 4 clients; 20 in 10 rounds
    assert forecast.to_save() == 20 - 1
    for seconds in (1.0, 1.0):
        forecast.note(0, "work", seconds)
    assert forecast.to_save() == 30 - 3  # 3 instead of 6
    for seconds in (0.5, 0.5, 0.5, 0.5):
        forecast.note(0, "evaluate", seconds)
    assert forecast.to_save() == 40 - 4  # 1 instead of 2 besides
    forecast.note(1, "work", 1.0)
    assert forecast.to_save() == 36  # 9 rounds like the one before
    assert forecast.seconds == 9


def test_one_client_that_takes_all_the_time_gains_nothing() -> None:
    forecast = Forecast(rounds=100, sampled=3, processes=3)
    for seconds in (0.0, 60.0, 0.0):
        forecast.note(0, "work", seconds)
    assert forecast.to_save() == 0


# ---- threads and processes are decided beforehand --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "settings", "processes", "threads"),
    [
        (2, {}, 2, 1),
        (8, {}, 8, 1),
        (8, {"clients": 3}, 3, 2),
        (8, {"clients": 20, "participation": 0.2}, 4, 2),
        (8, {"clients": 20, "participation": 0.01}, 1, None),
        (8, {"clients": 1}, 1, None),
        (1, {}, 1, None),
        (8, {"threads": 2}, 4, 2),
        (8, {"threads": 8}, 1, 8),
        (8, {"engine": "ray"}, 1, None),
        (8, {"device": "cuda"}, 1, None),
        (8, {"workers": 1}, 1, None),
        (8, {"workers": 3, "threads": 5}, 3, 5),
        (8, {"models": [lambda: None]}, 1, None),
        (8, {"models": "toys.normed"}, 8, 1),
        (8, {"models": "no.such.model"}, 1, None),
    ],
)
def test_processes_and_threads(cores: int, settings: dict[str, Any], processes: int, threads: int | None) -> None:
    torch.set_num_threads(cores)
    described = experiment("fedgh", **{"device": "cpu", "clients": 8} | settings)
    assert (described.processes(), described.threads_per_worker()) == (processes, threads)


def test_a_run_has_the_threads_that_were_decided() -> None:
    for workers, expected in (("auto", 1), (1, 2)):
        (_, threads, *_), _ = look(workers=workers, threads=None)
        assert set(threads) == {expected}
    assert torch.get_num_threads() == 2


def test_numbers_are_what_they_were() -> None:
    for workers, kind in (("auto", Auto), (1, Serial), (2, Workers)):
        engine = engine_for(assemble_tiny(workers=workers), lambda k: None, pytest.fail)
        assert type(engine) is kind


def test_comparisons_run_in_one_process_each() -> None:
    assert {name: common_settings(None)[name] for name in ("workers", "threads")} == {"workers": 1, "threads": 1}
    assert Experiment().workers == "auto"


def test_other_values_are_refused(terminal: Terminal, tmp_path: Path) -> None:
    with refused(UnknownNameError, "workers", "whole number", "auto", "many"):
        experiment("fedgh", workers="many")
    with refused(RangeError, "workers", "at least 1", "0"):
        experiment("fedgh", workers=0)
    with refused(FormatError, "workers", "auto", "1.5"):
        experiment("fedgh", workers=1.5)
    for word in ("many", "0", "1.5"):
        said = terminal.refused("run", "fedgh", "--workers", word, "--out", tmp_path / "out")
        assert_facts(said, "--workers", word)


def test_bench_says_where_clients_ran(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"data": few_digits(), "clients": 4, "models": "mlp-64", "device": "cpu"}
    machine = bench("local", **settings, rounds=1, progress=False).machine
    assert (machine.engine, machine.workers, machine.threads) == ("workers", 2, 1)
    monkeypatch.setattr(auto, "LEAST_SAVED", MANY)
    machine = bench("local", **settings, rounds=1, progress=False).machine
    assert (machine.engine, machine.workers, machine.threads) == ("serial", 1, 1)


# ---- when processes cannot start -------------------------------------------------------------------------------------


def in_a_pool(connection: Any) -> None:
    torch.set_num_threads(2)
    for name, value in AT_ONCE.items():
        setattr(auto, name, value)
    (pids, *_), census = look(threads=1, rounds=2)
    engine = engine_for(assemble_tiny(threads=1), lambda k: None, pytest.fail)
    connection.send((set(pids) == {os.getpid()}, census.alive, type(engine).__name__))


def test_a_process_of_a_pool_keeps_its_clients() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=in_a_pool, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(PATIENCE)
    assert ours.recv() == (True, [0, 0], "Serial")
    process.join()


def test_a_lambda_stays_here(at_once: None) -> None:
    census = Census()
    result = run_tiny("local", models=lambda shape: normed(shape), workers="auto", threads=1, observers=[census])
    assert census.alive == [0, 0]
    assert result.history[-1]["loss"] is not None


MODULE = """
from toys import normed

import pluribus


@pluribus.register_model("by-a-module", "registered when it is imported")
def flat(shape):
    return normed(shape)
"""


@pytest.mark.parametrize(("models", "alive"), [("toys.lstm", 2), ("by-a-module", 2), ("by-a-call", 0)])
def test_models_that_a_process_can_import_go_there(
    models: str, alive: int, at_once: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(zoo, "_entries", zoo.entries())
    (tmp_path / "registers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "registers", raising=False)
    importlib.import_module("registers")
    register_model("by-a-call", "no module registers it")(partial(normed))
    census = Census()
    run_tiny("local", models=models, workers="auto", threads=1, observers=[census])
    assert census.alive == [alive, alive]


def test_a_run_goes_on_if_no_process_can_start(tmp_path: Path) -> None:
    """No file can be opened, so there is no pipe to a process."""
    ended = run_script(
        tmp_path,
        """
        import resource

        class Closed:
            def start(self, federation):
                limits = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))

        settings = {"data": DIGITS, "clients": 4, "rounds": 2, "device": "cpu", "threads": 1, "progress": False}
        first = pluribus.run("fedgh", workers=1, **settings)  # everything that is needed is imported
        process_context()
        second = pluribus.run("fedgh", observers=[Closed()], **settings)
        print(first.history[-1]["loss"] == second.history[-1]["loss"])
        """,
    )
    assert (ended.stdout.split(), ended.stderr) == (["True"], "")


def test_a_worker_that_is_killed_later_ends_the_run(at_once: None) -> None:
    name, out = "a prototype method", new_folder()
    settings = FEW | {"clients": 4, "rounds": 2, "lr": 0.05, "device": "cpu", "out": out, "workers": "auto"}
    killer = Killer(signal.SIGKILL)
    with refused(WorkerError, f"pluribus resume {out}", "memory", "fewer --workers") as caught:
        pluribus.run("fedgh", progress=False, observers=[killer], **settings)
    assert_facts(str(caught.value), f"process {killer.pid}")
    assert multiprocessing.active_children() == []
    assert_same(serial(name), pluribus.resume(out, progress=False))


# ---- a user's own script ---------------------------------------------------------------------------------------------

HEAD = f"""
import os

import torch

import pluribus
from pluribus.engines import auto
from pluribus.data.datasets import load
from pluribus.processes import process_context

DIGITS = {few_digits()!r}
auto.LEAST_SECONDS, auto.LEAST_SAVED, auto.PATIENCE = 0.0, -1e9, {PATIENCE}.0
torch.set_num_threads(2)


class Census:
    def round(self, record, ledger):
        import multiprocessing

        print(len(multiprocessing.active_children()), "x", torch.get_num_threads())

"""


def run_script(folder: Path, text: str, *how: str) -> subprocess.CompletedProcess[str]:
    """Run a script that has no guard, as a file or in another way, with two cores."""
    text = HEAD + textwrap.dedent(text)
    (folder / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, *(how or ["script.py"])],
        input=text if how == ("-",) else None,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(pluribus.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


NAMED = """
print("begin")
pluribus.run("fedgh", data=DIGITS, clients=4, rounds=2, device="cpu", observers=[Census()], progress=False)
print("end")
"""


@pytest.mark.parametrize(
    "how", [(), ("-",), ("-c", "import script"), ("-m", "script")], ids=["file", "stdin", "c", "m"]
)
def test_a_script_without_a_guard_runs_once(tmp_path: Path, how: tuple[str, ...]) -> None:
    ended = run_script(tmp_path, NAMED, *how)
    assert (ended.stdout.splitlines(), ended.stderr, ended.returncode) == (["begin", "2 x 1", "2 x 1", "end"], "", 0)


OWN = """
class Mine(pluribus.Method):
    paper = "mine"

    def local_update(self, client):
        client.fit(self.step)
        return pluribus.Message({})


def flat(shape):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8))


pluribus.register_model("mine", "registered in a script")(flat)
few = {"data": DIGITS, "clients": 4, "rounds": 1, "device": "cpu", "observers": [Census()], "progress": False}
print("begin")
pluribus.run(Mine, **few)
pluribus.run("fedgh", models=flat, **few)
pluribus.run("fedgh", models="mine", **few)
pluribus.run("fedgh", models="__main__.flat", **few)
pluribus.run("fedgh", **few | {"data": lambda: load(DIGITS)})  # its rows go there, and the function does not
"""


def test_what_a_script_defines_stays_in_its_process(tmp_path: Path) -> None:
    ended = run_script(tmp_path, OWN)
    lines = ["begin", *["0 x 2"] * 4, "2 x 1"]
    assert (ended.stdout.splitlines(), ended.stderr, ended.returncode) == (lines, "", 0)

"""Ray: the same bits as one after the other, on actors that come and go; real ones, of a cluster on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

import pluribus
from conftest import few_digits, new_folder, run_tiny, tiny
from kit import StopAfter, StoppedError, assert_same
from places import Broken
from pluribus.errors import ConflictError, DeviceError, NotFiniteError, UnknownNameError
from pluribus.internal.blame import blame_of
from pluribus.method import name_of
from pluribus.models import zoo
from pluribus.result import Result
from processes import start
from refusals import assert_facts, refused
from toys import Counted

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]

FEW = {"data": few_digits(160), "checkpoint_every": 1, "threads": 1}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "a prototype method": ("fedgh", {}),
    "gradients of gradients": ("fedl2g-f", {}),
    "peers": ("fedh2l", {"partition": "dirichlet", "public_fraction": 0.2}),
    "two exchanges": ("fedfree", {"momentum": 0.9}),
    "enrolment": (name_of(Counted), {"participation": 0.5, "rounds": 3}),
}


def run(name: str, **settings: Any) -> Result:
    method, own = RUNS[name]
    return run_tiny(method, **FEW | own | settings)


@cache
def serial(name: str) -> Result:
    return run(name)


@pytest.mark.parametrize("name", list(RUNS)[4:])  # test_transports.py has the first four
def test_the_same_bits_as_one_after_the_other(name: str) -> None:
    assert_same(serial(name), run(name, engine="ray", workers=2))


@pytest.mark.parametrize(("name", "attack"), [("a prototype method", "replay"), ("peers", "nan")])
def test_attackers_send_the_same_lies(name: str, attack: str) -> None:
    lies = {"attack": attack, "attackers": 1}
    assert_same(run(name, **lies, workers=1), run(name, **lies, engine="ray", workers=2))


def test_clients_move_with_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time another plan: everyone to the other actor. And a stopped run goes on with new ones."""
    plans: list[dict[int, int]] = []

    def turning(costs: Mapping[int, float], owner: Mapping[int, int], workers: int) -> dict[int, int]:
        plans.append({k: (k + len(plans)) % workers for k in costs})
        return plans[-1]

    monkeypatch.setattr("pluribus.engines.spread.assign", turning)
    settings = {"momentum": 0.9, "rounds": 4}
    folder = new_folder()
    with pytest.raises(StoppedError):
        run_tiny("fedfree", folder, observers=[StopAfter(2)], **FEW, **settings, engine="ray", workers=2)
    assert len(plans) > 4
    assert_same(run_tiny("fedfree", **FEW, **settings), pluribus.resume(folder, progress=False))


# ---- faults ----------------------------------------------------------------------------------------------------------


class KillAnActor:
    """Kills the process of one actor, with SIGKILL, after these rounds."""

    def __init__(self, *rounds: int) -> None:
        self._rounds = list(rounds)
        self._federation: Any = None

    def start(self, federation: Any) -> None:
        self._federation = federation

    def round(self, record: Mapping[str, Any], ledger: Any) -> None:
        if record["round"] in self._rounds:
            self._rounds.remove(record["round"])
            import ray

            os.kill(ray.get(self._federation.engine._hosts[0].process.remote()), signal.SIGKILL)

    def finish(self, result: Any) -> None:
        pass


def test_a_killed_actor_costs_time_but_no_numbers() -> None:
    """The checkpoint is older than the round that is lost."""
    settings = {"rounds": 4, "checkpoint_every": 2, "straggler_rate": 0.2}
    result = run("peers", **settings, engine="ray", workers=2, observers=[KillAnActor(2)])
    assert_same(run("peers", **settings), result)
    (told,) = [sentence for sentence in result.warnings if "actor" in sentence]
    assert_facts(told, "ActorDiedError", "round 2")


def test_what_goes_wrong_in_an_actor_is_said_here() -> None:
    with refused(NotFiniteError, "'means'", "--lr"):
        run("a prototype method", engine="ray", lr=1e30)


def test_a_method_that_raises_in_an_actor_says_where() -> None:
    with pytest.raises(ValueError, match="one is odd") as caught:
        run_tiny(Broken(), engine="ray", threads=1)
    known = blame_of(caught.value)
    assert known is not None
    assert known.where == ("round 0", "client 1")
    assert known.line.startswith("places.py, line ")


def test_what_actors_do_not_know_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that only this process knows: no actor is lost for it, and none is tried again."""
    monkeypatch.setitem(zoo._entries, "only-here", zoo._entries["mlp-64"])
    with refused(UnknownNameError, "'only-here'"):
        run("a prototype method", engine="ray", models="only-here")


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_more_than_the_cluster_has() -> None:
    with refused(DeviceError, "4 workers", "4 CPUs", "has 2", "--workers", "--threads"):
        run("a prototype method", engine="ray", workers=4)
    with refused(DeviceError, "2 workers", "1 GPUs", "has 0", "--workers", "--gpu-share"):
        run("a prototype method", engine="ray", workers=2, gpu_share=0.5)


def test_a_running_cluster_by_its_address() -> None:
    """From a process that knows nothing of this one."""
    import ray

    address, folder = ray.get_runtime_context().gcs_address, new_folder()
    same = [f"--{name.replace('_', '-')}={value}" for name, value in tiny(**FEW).items()]
    there = ["--engine", "ray", "--ray-address", address, "--out", folder]
    process = start("run", "fedgh", *same, *there, env={"RAY_AUTH_MODE": "token"})  # which is kept in this home
    assert process.wait() == 0, process.err
    assert_same(serial("a prototype method"), pluribus.resume(folder, progress=False))


def test_nobody_at_the_address() -> None:
    process = start("run", "fedgh", "--engine", "ray", "--ray-address", "127.0.0.1:1", "--out", new_folder())
    assert process.wait() == 2
    assert_facts(process.err, "Ray", "127.0.0.1:1", "Connection refused")


@pytest.mark.parametrize("settings", [{"ray_address": "auto"}, {"gpu_share": 0.5}], ids=["address", "share"])
def test_flags_of_ray_without_ray(settings: dict[str, Any]) -> None:
    with refused(ConflictError, "--ray-address", "--gpu-share", "--engine ray"):
        pluribus.run("local", progress=False, **settings)

"""Ray: the same bits as one after the other, on actors that come and go; real ones, of a cluster on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch

import pluribus
from conftest import few_digits, new_folder, run_tiny
from kit import StopAfter, StoppedError, assert_same
from pluribus.errors import ConfigError, NotFiniteError
from pluribus.method import name_of
from pluribus.result import Result
from toys import Consensus, Counted, Pairs

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.xdist_group("ray")  # one cluster is enough for this machine

FEW = {"data": few_digits(160), "checkpoint_every": 1, "threads": 1}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "a prototype method": ("fedgh", {}),
    "gradients of gradients": ("fedl2g-f", {}),
    "peers": ("fedh2l", {"partition": "dirichlet", "public_fraction": 0.2}),
    "pairs of peers, some late": (name_of(Pairs), {"clients": 5, "rounds": 3, "straggler_rate": 0.3}),
    "two exchanges": ("fedfree", {"momentum": 0.9}),
    "enrolment": (name_of(Counted), {"participation": 0.5, "rounds": 3}),
    "slots that outlive an exchange": (name_of(Consensus), {"optimizer": "adam", "lr": 0.001}),
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for all: to start one takes seconds."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def run(name: str, **settings: Any) -> Result:
    method, own = RUNS[name]
    return run_tiny(method, **FEW | own | settings)


@cache
def serial(name: str) -> Result:
    return run(name)


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits_as_one_after_the_other(name: str) -> None:
    assert_same(serial(name), run(name, engine="ray", workers=2))


def test_clients_that_give_up_their_place_stay_with_their_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pluribus.site.MOST_CLIENTS", 1)
    assert_same(serial("a prototype method"), run("a prototype method", engine="ray", workers=1))


def test_clients_move_with_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round another plan: everyone to the other actor."""
    plans: list[dict[int, int]] = []

    def turning(costs: Mapping[int, float], owner: Mapping[int, int], workers: int) -> dict[int, int]:
        plans.append({k: (k + len(plans)) % workers for k in costs})
        return plans[-1]

    monkeypatch.setattr("pluribus.engines.ray.assign", turning)
    assert_same(serial("two exchanges"), run("two exchanges", engine="ray", workers=2))
    assert len(plans) > 4


def test_a_run_goes_on_elsewhere(tmp_path: Any) -> None:
    folder = new_folder()
    with pytest.raises(StoppedError):
        run_tiny("fedgh", folder, observers=[StopAfter(1)], **FEW, rounds=4, engine="ray", workers=2)
    assert_same(run_tiny("fedgh", **FEW, rounds=4), pluribus.resume(folder, progress=False))


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
            os.kill(ray.get(self._federation.engine._actors[0].process.remote()), signal.SIGKILL)

    def finish(self, result: Any) -> None:
        pass


@pytest.mark.parametrize(("every", "name"), [(1, "two exchanges"), (2, "peers"), (100, "enrolment")])
def test_a_killed_actor_costs_time_but_no_numbers(every: int, name: str) -> None:
    settings = {"rounds": 5, "checkpoint_every": every, "workers": 2}
    straight = run(name, rounds=5, checkpoint_every=every)
    result = run(name, **settings, engine="ray", observers=[KillAnActor(1, 3)])
    assert_same(straight, result)
    told = [sentence for sentence in result.warnings if "actor" in sentence]
    assert len(told) == 2
    assert all("Went on from" in sentence for sentence in told)


def test_an_actor_that_dies_again_and_again_ends_the_run() -> None:
    with pytest.raises(pluribus.PluribusError, match=r"actor was lost.*pluribus resume"):
        run("a prototype method", engine="ray", rounds=3, checkpoint_every=3, observers=[KillAnActor(0, 0, 0)])


def test_what_goes_wrong_in_an_actor_is_said_here() -> None:
    with pytest.raises(NotFiniteError, match=r"holds NaN or infinity\. Lower --lr"):
        run("a prototype method", engine="ray", workers=2, lr=1e30)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_more_than_the_cluster_has() -> None:
    with pytest.raises(ConfigError, match="4 workers take 4 CPUs, and the cluster has 2"):
        run("a prototype method", engine="ray", workers=4)
    with pytest.raises(ConfigError, match="2 workers take 1 GPUs, and the cluster has 0"):
        run("a prototype method", engine="ray", workers=2, gpu_share=0.5)


@pytest.mark.parametrize("settings", [{"ray_address": "auto"}, {"gpu_share": 0.5}], ids=["address", "share"])
def test_flags_of_ray_without_ray(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="are for --engine ray"):
        pluribus.run("local", progress=False, **settings)


def test_the_arithmetic_of_this_process_is_the_actors() -> None:
    before = torch.get_num_threads()
    run("a prototype method", engine="ray", workers=1)
    assert torch.get_num_threads() == before

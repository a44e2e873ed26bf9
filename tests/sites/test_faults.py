"""Faults of real federations: killed, late, cut off, lying, strange. Rounds end, reasons are told, nothing is lost."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import pluribus
from conftest import few_digits, new_folder
from kit import differing, kept, numbers, timeless
from network import PATIENCE, Network, Puppet, Wire
from pluribus.assembly import assemble
from pluribus.experiment import experiment
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.flower.programs import environment, flower, free_port
from pluribus.sites.keys import make_keys
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.files import read_json
from pluribus.storage.toml import to_toml
from refusals import assert_facts

pytest.importorskip("flwr")

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.xdist_group("faults")]

WORKER, CLIENT = "pluribus-site", "flwr-clientapp"


def settings(clients: int, rounds: int) -> dict[str, Any]:
    images = {"data": few_digits(160), "val_fraction": 0.1, "test_fraction": 0.2}
    return images | {"clients": clients, "models": "mlp-64", "rounds": rounds, "evaluate_every": rounds, "threads": 1}


def network_of(folder: Path, names: dict[int, str], rounds: int, **server: Any) -> Network:
    """A federation that could be simulated with the same settings."""
    parts = assemble(experiment("fedgh", **settings(len(names), rounds)))
    network = Network(folder, parts, names)
    shape = {"classes": list(parts.task.names), "image": list(parts.task.shape)}
    network.write_server(rounds=rounds, evaluate_every=rounds, **shape, **server)
    return network


# ---- sites that fail -----------------------------------------------------------------------------------------------

NAMES = {0: "north", 1: "south", 2: "west"}
ROUNDS = 6


def changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[bytes], bytes]:
    """An answer in which the tensors are others."""

    def falsify(answer: bytes) -> bytes:
        head, parts = unseal(answer)
        tensors = safetensors.torch.load(parts["up"])
        change(tensors)
        return seal(head, {"up": safetensors.torch.save(tensors)})

    return falsify


LIES: dict[int, tuple[Any, ...]] = {
    2: (changed(lambda sent: sent["means"].fill_(torch.nan)), "'means'", "NaN"),
    3: (changed(lambda sent: sent.update(means=sent["means"][:, :3].contiguous())), "'means'", "(10, 3)"),
    4: (lambda answer: answer[:-7], "length"),
}


class Story:
    """A federation in which much happens, and what can be said of it afterwards."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.intruders: dict[str, int] = {}
        """How each of them ended."""
        self.known: dict[str, list[Any]] = {}
        """The runs and the nodes that the SuperLink knew, after the intruders."""

    def worked(self, name: str, t: int) -> Callable[[], bool]:
        """Whether a site has done its work of a round."""
        return lambda: f"round {t}: work" in self.network.said(name)

    def ended(self, t: int) -> Callable[[], bool]:
        """Whether the server has ended a round."""
        return lambda: len(self.network.rounds()) > t

    def result(self) -> dict[str, Any]:
        """What the server has written in the end."""
        return dict(read_json(self.network.folder / "federation" / "result.json"))

    def missing(self, name: str) -> dict[int, str]:
        """In which rounds a site was missing, and why, as the result says it."""
        told = [re.fullmatch(rf"site {name} .*?round (\d+): (.*)", one) for one in self.result()["warnings"]]
        return {int(one[1]): one[2] for one in told if one}

    def kept(self, name: str) -> list[int]:
        """The rounds of which a site has state on its disk."""
        files = (self.network.folder / name / "state").glob("fedgh-*/[0-9]*.safetensors")
        return sorted(int(file.name.split("-")[0]) - 1 for file in files)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, killed: Future[Story]) -> Iterator[Story]:
    """Round 1: north is killed, south is late. Round 2: south is cut off. Rounds 2 to 4: west lies."""
    network = network_of(tmp_path_factory.mktemp("sites"), NAMES, ROUNDS, deadline=25.0)
    told = Story(network)
    with ThreadPoolExecutor() as beside, closing(network), closing(Wire(network.port)) as wire:
        file = network.folder / "south.toml"
        file.write_text(file.read_text().replace(network.address, wire.address))
        server = network.pluribus("server", "serve", "fedgh", "--config", network.folder / "federation.toml")
        network.until(lambda: "listening on" in network.said("server"))
        south = network.join("south")
        network.join("north")
        with Puppet(network, "west", {t: lie for t, (lie, *_) in LIES.items()}) as west:
            network.until(told.ended(0))
            for name in ("north", "south"):
                network.signal(name, WORKER, signal.SIGSTOP)
            network.until(lambda: west.asked == 1)
            network.until(lambda: network.process("north", CLIENT))  # and waits there for the worker
            network.kill("north")
            north = network.join("north")
            intruders = beside.submit(intrude, network)
            network.until(told.ended(1))
            network.signal("south", WORKER, signal.SIGCONT)
            wire.cut()
            network.until(told.ended(2))
            wire.mend()
            network.until(lambda: server.poll() is not None)
            assert [process.wait(60) for process in (server, north, south)] == [0, 0, 0]
            told.intruders, told.known = intruders.result()
        yield told


def test_every_round_ends_with_whoever_answered(story: Story) -> None:
    """All that is missing is told: in the result, and in the server's log when it happens."""
    result, said = story.result(), " ".join(story.network.said("server").split())  # which is wrapped
    assert [record["round"] for record in story.network.rounds()] == list(range(ROUNDS))
    before = range(ROUNDS - 1)  # in the last round there is an evaluation, too, to be missing at
    absent = [sum(t in story.missing(name) for name in NAMES.values()) for t in before]
    assert [story.network.rounds()[t]["answered"] for t in before] == [3 - number for number in absent]
    assert [one for one in result["warnings"] if one not in said] == []


def test_a_site_that_was_killed_goes_on_from_its_folder(story: Story) -> None:
    missing = list(story.missing("north"))
    assert missing == list(range(1, 1 + len(missing)))
    done = story.kept("north")
    assert ROUNDS - 1 in done
    assert set(done) >= set(range(ROUNDS)) - set(missing)
    assert counted(story, "north") == list(range(len(done)))


def counted(story: Story, name: str) -> list[int]:
    """How much a site had done before each of the requests that it did."""
    found = []
    for file in sorted((story.network.folder / name / "state").glob("fedgh-*/[0-9]*.safetensors")):
        with safe_open(file, framework="pt") as kept:
            found.append(int(kept.metadata()["before"]))
    return found


def test_a_site_that_is_late_is_missing_but_learns(story: Story) -> None:
    assert "deadline" in story.missing("south")[1]
    assert 1 in story.kept("south")
    assert counted(story, "south") == list(range(len(story.kept("south"))))


def test_a_site_that_is_cut_off_comes_back(story: Story) -> None:
    missing = list(story.missing("south"))
    assert missing[:2] == [1, 2]
    assert missing == list(range(1, 1 + len(missing)))
    assert "lost the connection" in story.network.said("south")
    assert ROUNDS - 1 in story.kept("south")


def test_a_site_that_sends_nonsense_did_not_answer(story: Story) -> None:
    missing = story.missing("west")
    assert missing.keys() == LIES.keys()
    for t, (_, *facts) in LIES.items():
        assert_facts(missing[t], *facts)


# ---- intruders -----------------------------------------------------------------------------------------------------


def intrude(network: Network) -> tuple[dict[str, int], dict[str, list[Any]]]:
    """What strangers get who have the CA's certificate and can reach the gate, and what the SuperLink knows then."""
    home, ca = network.folder / "intruder", network.folder / "keys" / "ca.crt"
    make_keys(home / "keys", ["127.0.0.1"], ["stranger"], 30, datetime.now(UTC))
    key = home / "keys" / "sites" / "stranger" / "stranger.key"
    gate = {"address": network.address, "root-certificates": str(ca)}
    (home / "config.toml").write_text(to_toml({"superlink": {"gate": gate}}))
    node = [flower("flower-supernode"), "--root-certificates", ca, "--superlink", network.address]
    link, control = network.folder / "federation" / "link", flower("flwr")
    tries = {
        "keyless": [*node, "--port", free_port()],
        "stranger": [*node, "--port", free_port(), "--auth-supernode-private-key", key],
        "register": [control, "supernode", "register", key.with_suffix(".pub"), "gate"],
        "run": [control, "run", link / "app", "gate"],
        "list": [control, "list", "gate"],
    }
    running = {name: network.start(name, *command, env=environment(home)) for name, command in tries.items()}
    ended = {name: process.wait(PATIENCE) for name, process in running.items()}
    runs, nodes = (network.flwr(link / "home", *words, "here") for words in (["list"], ["supernode", "list"]))
    return ended, {"runs": runs["runs"], "nodes": nodes["nodes"]}


def test_intruders_learn_and_run_nothing(story: Story) -> None:
    refused = {"keyless": "404", "stranger": "2004", "register": "404", "run": "404", "list": "404"}
    for name, reason in refused.items():
        assert story.intruders[name] != 0, name
        assert reason in story.network.said(name)
    assert len(story.known["runs"]) == 1
    assert len(story.known["nodes"]) == 3
    log = (story.network.folder / "federation" / "link" / "gate.log").read_text()
    for call in ("fleet/register-node", "control/register-node", "control/start-run", "control/list-runs"):
        assert f" 404 127.0.0.1 POST /v1/{call}\n" in log


# ---- kills without a trace -------------------------------------------------------------------------------------------

PAIR = {0: "north", 1: "south"}
FEW = 3
KILLS = 3
BROKEN = "a process of Flower was killed"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Story]]:
    """A second federation, beside the first: both mostly wait."""
    with ThreadPoolExecutor() as beside:
        yield beside.submit(kill, network_of(tmp_path_factory.mktemp("killed"), PAIR, FEW))


def kill_clientapps(network: Network, name: str, times: int) -> None:
    """Each in the middle of its work: the worker is frozen, so that it cannot answer."""
    network.signal(name, WORKER, signal.SIGSTOP)
    for number in range(times):
        network.until(lambda: network.process(name, CLIENT))
        network.signal(name, CLIENT, signal.SIGTERM)  # which it ignores
        network.signal(name, CLIENT, signal.SIGKILL)
        network.until(lambda number=number: network.said(name).count(BROKEN) > number)
    network.signal(name, WORKER, signal.SIGCONT)


def kill(network: Network) -> Story:
    """ClientApps, a worker, the server as a whole, its SuperLink and its gate."""
    told = Story(network)
    with closing(network):
        command = ("serve", "fedgh", "--config", network.folder / "federation.toml")
        network.pluribus("server", *command)
        network.until(lambda: "listening on" in network.said("server"))
        sites = [network.join(name) for name in PAIR.values()]
        network.until(told.ended(0))
        network.signal("south", WORKER, signal.SIGKILL)
        kill_clientapps(network, "north", KILLS)
        network.until(told.worked("north", 1))
        network.kill("server")
        assert not told.ended(1)()
        server = network.pluribus("server", *command)
        network.until(told.ended(1))
        for name in ("flower-superlink", "pluribus-gate"):
            network.signal("server", name, signal.SIGKILL)
        assert [process.wait(PATIENCE) for process in (server, *sites)] == [0, 0, 0]
    return told


def test_whatever_is_killed_the_numbers_are_the_same(killed: Future[Story]) -> None:
    """What was done is not lost, nor done twice."""
    simulated = pluribus.run("fedgh", progress=False, out=new_folder(), **settings(len(PAIR), FEW))
    told = killed.result()
    network, folder = told.network, told.network.folder / "federation"
    assert [timeless(record) for record in network.rounds()] == numbers(simulated)
    assert told.result()["warnings"] == []
    assert "status -9" in network.said("south")
    assert network.said("north").count(BROKEN) == KILLS
    found = {f"server {name}": value for name, value in Checkpoint(folder / "state").server().items()}
    for k in PAIR:
        found |= {f"client {k} {name}": value for name, value in network.learned(k).items()}
    assert differing(kept(simulated), found) == []


# ---- a well-formed lie -----------------------------------------------------------------------------------------------


def test_the_largest_float_does_not_end_a_federation(tmp_path: Path, killed: Future[Story]) -> None:
    """South lies in round 1. The server is killed afterwards, and starts again from what it saved."""
    killed.result()
    network = network_of(tmp_path, PAIR, FEW)
    told, most = Story(network), torch.finfo(torch.float32).max
    lie = changed(lambda sent: sent["means"].fill_(most))
    with closing(network):
        command = ("serve", "fedgh", "--config", network.folder / "federation.toml")
        network.pluribus("server", *command)
        network.until(lambda: "listening on" in network.said("server"))
        north = network.join("north")
        with Puppet(network, "south", {1: lie}):
            network.until(told.ended(1))
            network.kill("server")
            server = network.pluribus("server", *command)
            assert [process.wait(PATIENCE) for process in (server, north)] == [0, 0]
    assert [record["answered"] for record in network.rounds()] == [2, 1, 2]
    assert_facts(told.missing("south")[1], "'means'", "3.4e+38")
    assert "3.4e+38" in network.said("server")
    saved = Checkpoint(network.folder / "federation" / "state").server()
    assert all(value.isfinite().all() for value in saved.values())

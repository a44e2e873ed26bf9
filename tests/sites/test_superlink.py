"""A federation over a SuperLink that somebody else operates."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

import pluribus
from conftest import few_digits, new_folder
from kit import differing, kept, numbers, timeless
from network import PATIENCE, Network
from pluribus.assembly import assemble
from pluribus.experiment import experiment
from pluribus.sites.flower.programs import environment, flower, free_port
from pluribus.sites.keys import make_keys
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.files import read_json
from pluribus.storage.toml import to_toml

pytest.importorskip("flwr")

pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.xdist_group("network")]

LOST = "127.0.0.1:9"  # where nobody listens
NAMES = {0: "north", 1: "south"}
SETTINGS: dict[str, Any] = {
    "data": few_digits(160),
    "val_fraction": 0.1,
    "test_fraction": 0.2,
    "clients": 2,
    "models": "mlp-64",
    "rounds": 1,
    "threads": 1,
}


class Operated(NamedTuple):
    """What is left of a federation."""

    network: Network
    alive: bool
    nodes: list[dict[str, Any]]
    north: str
    lost: int


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """The operator has a CA of its own, and has registered north with a key of its own. The server registers south."""
    folder = tmp_path_factory.mktemp("operated")
    network = Network(folder, parts := assemble(experiment("fedgh", **SETTINGS)), NAMES)
    theirs, home, address = folder / "theirs", folder / "home", f"127.0.0.1:{free_port()}"
    make_keys(theirs, ["127.0.0.1"], ["elsewhere"], 30, datetime.now(UTC))
    key, ca = theirs / "sites" / "elsewhere" / "elsewhere.key", theirs / "ca.crt"
    home.mkdir()
    (home / "config.toml").write_text(
        to_toml({"superlink": {"default": "ours", "ours": {"address": address, "root-certificates": str(ca)}}})
    )
    with closing(network):
        tls = ["--ssl-ca-certfile", ca, "--ssl-certfile", theirs / "server" / "server.pem"]
        tls += ["--ssl-keyfile", theirs / "server" / "server.key", "--enable-supernode-auth"]
        where = ["--host", "127.0.0.1", "--port", address.split(":")[1], "--database", folder / "link.db"]
        superlink = network.start("superlink", flower("flower-superlink"), *tls, *where, env=environment(home))
        network.until(lambda: answers(address))
        north = str(network.flwr(home, "supernode", "register", key.with_suffix(".pub"), "ours")["node-id"])
        shape = {"classes": list(parts.task.names), "image": list(parts.task.shape)}
        network.write_server(rounds=1, **shape, superlink_ca="theirs/ca.crt", nodes={"north": north})
        command = ("serve", "fedgh", "--config", folder / "federation.toml", "--superlink", address)
        server = network.pluribus("server", *command)
        lost = network.pluribus("lost", *command[:-1], LOST, "--out", folder / "lost")
        for name in NAMES.values():
            file, own = folder / f"{name}.toml", f"ca = '{ca}'\n" + (f"key = '{key}'\n" if name == "north" else "")
            file.write_text(own + file.read_text().replace(network.address, address))
        sites = [network.join(name) for name in NAMES.values()]
        network.until(lambda: server.poll() is not None)
        assert [process.wait(PATIENCE) for process in (server, *sites)] == [0, 0, 0], network.said("server")
        nodes = network.flwr(home, "supernode", "list", "ours")["nodes"]
        yield Operated(network, superlink.poll() is None, nodes, north, lost.wait(PATIENCE))


def answers(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def test_the_bits_are_those_of_a_simulation(operated: Operated) -> None:
    simulated = pluribus.run("fedgh", progress=False, out=new_folder(), **SETTINGS)
    network = operated.network
    assert [timeless(record) for record in network.rounds()] == numbers(simulated)
    saved = Checkpoint(network.folder / "federation" / "state").server()
    found = {f"server {name}": value for name, value in saved.items()}
    for k in NAMES:
        found |= {f"client {k} {name}": value for name, value in network.learned(k).items()}
    assert differing(kept(simulated), found) == []


def test_the_superlink_stays_as_it_was(operated: Operated) -> None:
    """It runs, and knows the node that its operator has registered."""
    assert operated.alive
    known = [node for node in operated.nodes if node["status"] != "unregistered"]
    assert [str(node["node-id"]) for node in known] == [operated.north]
    link = operated.network.folder / "federation" / "link"
    assert not list(link.glob("*.db")) + list(link.glob("gate.log"))
    assert read_json(link / "nodes.json") == {}


def test_a_superlink_that_does_not_answer_is_an_error(operated: Operated) -> None:
    assert operated.lost == 2
    assert LOST in operated.network.said("lost")
    assert "Traceback" not in operated.network.said("lost")

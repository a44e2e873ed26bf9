"""One test for every transport: the same bits after several rounds, wherever clients are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import pluribus
from conftest import few_digits, new_folder, suiting
from kit import kept, numbers, selected
from network import Network
from pluribus.assembly import Assembly, assemble
from pluribus.experiment import experiment
from pluribus.privacy.account import read_spends
from pluribus.privacy.accountant import epsilon_of
from pluribus.result import Result
from pluribus.sites.agreement import Agreement, Form
from pluribus.sites.federate import SiteFacts, complete_agreement, dismiss, greet, make_federation
from pluribus.sites.flower.link import Endpoint, Link
from pluribus.sites.keys import read_site_keys
from pluribus.storage.checkpoint import Checkpoint
from pluribus.storage.folder import RunFolder

pytest.importorskip("flwr")

pytestmark = pytest.mark.slow

NAMES = {0: "north", 1: "south"}
DELTA = 1e-5  # the default of dp_delta
METHODS = ("fedgh", "fedl2g-f", "fedh2l", "fedfree")
SETTINGS: dict[str, Any] = {
    "data": few_digits(160),
    "image_size": 16,
    "partition": "dirichlet",
    "clients": 2,
    "models": "mlp-64,cnn-16",
    "width": 64,
    "val_fraction": 0.1,
    "test_fraction": 0.2,
    "public_fraction": 0.2,
    "augment": "crop,flip,erase",
    "rounds": 2,
    "evaluate_every": 2,
    "threads": 1,
    "device": "cpu",
}


def settings_of(method: str) -> dict[str, Any]:
    return suiting(method, **SETTINGS)


def parts_of(method: str) -> Assembly:
    return assemble(experiment(method, **settings_of(method)))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@cache
def serial(method: str) -> tuple[str, list[dict[str, Any]]]:
    result = pluribus.run(method, progress=False, out=new_folder(), **settings_of(method))
    return digest(everything(result)), numbers(result)


def everything(result: Result) -> dict[str, torch.Tensor]:
    """Of server and clients, and of the rounds that validation selects."""
    return kept(result) | {f"selected {name}": value for name, value in selected(result).items()}


@pytest.mark.xdist_group("ray")  # one cluster at a time
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", [{"workers": 2}, {"engine": "ray", "workers": 2}], ids=["workers", "ray"])
def test_on_one_machine(method: str, how: dict[str, Any], cluster: None) -> None:
    result = pluribus.run(method, progress=False, out=new_folder(), **settings_of(method) | how)
    assert (digest(everything(result)), numbers(result)) == serial(method)


# ---- Flower, with TLS, the gate and node authentication ------------------------------------------------------------


class Sites(NamedTuple):
    network: Network
    link: Link
    facts: dict[int, SiteFacts]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    """One link and two joined sites for all methods: what they agree on travels with every request."""
    network = Network(tmp_path_factory.mktemp("sites"), parts_of("fedh2l"), NAMES)
    keys, place = network.folder / "keys", network.folder / "link"
    place.mkdir()
    endpoint = Endpoint(network.address, keys / "server" / "server.pem", keys / "server" / "server.key", 10**6)
    try:
        with Link(place, endpoint, read_site_keys(keys / "sites.toml"), NAMES) as link:
            joined = [network.join(name) for name in NAMES.values()]
            yield Sites(network, link, greet(offer("fedh2l"), NAMES, link, 240))
            dismiss(offer("fedgh"), NAMES, link)
            assert [process.wait(60) for process in joined] == [0, 0]
    finally:
        network.close()


def offer(method: str, **more: Any) -> Agreement:
    parts = parts_of(method)
    described = experiment(method, **settings_of(method) | more)
    return Agreement.of_experiment(described, "-".join([method, *more]), parts.task.names, Form(parts.task.input))


@pytest.mark.network
@pytest.mark.xdist_group("network")
@pytest.mark.parametrize("method", METHODS)
def test_over_the_network(method: str, sites: Sites) -> None:
    network, link, facts = sites
    folder = RunFolder.create(new_folder())
    agreed = complete_agreement(offer(method), facts, NAMES)
    result = make_federation(experiment(method, **settings_of(method)), agreed, NAMES, facts, link, folder, 120).run()
    found = {f"server {name}": value for name, value in Checkpoint(folder.path / "state").server().items()}
    for k in NAMES:
        found |= {f"client {k} {name}": value for name, value in network.learned(k).items()}
        found |= {f"selected client {k} {name}": value for name, value in network.selected(k).items()}
    assert (digest(found), numbers(result)) == serial(method)


@pytest.mark.network
@pytest.mark.xdist_group("network")
def test_private_sites_over_the_network(sites: Sites) -> None:
    """Each site keeps its own account, with noise of its own system, and tells neither rows nor steps."""
    network, link, _ = sites
    settings: dict[str, Any] = {"dp_epsilon": 8.0, "share_counts": False, "rounds": 1}
    offered = offer("fedgh", **settings)
    facts = greet(offered, NAMES, link, 120)
    assert [one.samples for one in facts.values()] == [None, None]
    described, folder = experiment("fedgh", **settings_of("fedgh") | settings), RunFolder.create(new_folder())
    agreed = complete_agreement(offered, facts, NAMES)
    result = make_federation(described, agreed, NAMES, facts, link, folder, 120).run()
    (record,) = result.history
    told = record["privacy"]["epsilon"]
    assert set(told) == {"0", "1"}
    for k, name in NAMES.items():
        spent = read_spends(network.learned(k)["state.spent"])  # on the disk of the site
        assert told[str(k)] == epsilon_of(spent, DELTA) == pytest.approx(8.0, rel=0.01)
        assert f"epsilon {told[str(k)]:.2f} spent" in network.said(name)
    assert (record["loss"], record.get("steps")) == (None, None)
    assert result.warnings == [], "no site was missing"

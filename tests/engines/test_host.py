"""Clients that take turns in memory, and move between sites."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pluribus
from conftest import assemble_tiny, make_host
from kit import same_bits
from pluribus.host import Host
from pluribus.internal import batches
from pluribus.internal.snapshot import ALIGNMENT
from pluribus.request import Work
from pluribus.storage.memory import MemoryState

ROUNDS = 3


def parts_of(method: str = "fedl2g-f", **settings):
    return assemble_tiny(method, models="cnn-16-32", momentum=0.9, warmup=0, rounds=ROUNDS, **settings)


def states(*sites: Host) -> dict[int, dict[str, torch.Tensor]]:
    return {k: state for host in sites for k, state in host.take_changed().items()}


def alike(one, other) -> bool:
    return one.keys() == other.keys() and all(
        same_bits(one[k][name], value) for k in one for name, value in other[k].items()
    )


def alone() -> dict[int, dict[str, torch.Tensor]]:
    host = make_host(parts_of())
    for t in range(ROUNDS):
        for k in range(4):
            host.answer(Work(k, t))
    return states(host)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_one_place_serves_many_clients_of_an_architecture(most, monkeypatch):
    expected = alone()
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", most)
    host = make_host(parts_of())
    objects = set()
    for t in range(ROUNDS):
        for k in range(4):
            host.answer(Work(k, t))
            objects.add(id(host.client(k)))
    assert len(objects) == most, "a client is built once and then taken over"
    assert alike(states(host), expected)


@pytest.mark.parametrize("method", ["fedgh", "fedproto"])  # fedproto prepares its clients, fedgh does not
@pytest.mark.parametrize("saves", [False, True], ids=["unsaved", "saved"])
@pytest.mark.parametrize("models", ["cnn-16-32", "cnn-16-32,mlp-64"])
def test_expected_clients_have_the_same_bits(method, saves, models, monkeypatch):
    """Their weights are drawn by threads, and copied into the place of another client."""
    saved: dict[int, dict[str, torch.Tensor]] = {}

    def work(host: Host, ahead: bool) -> dict[int, dict[str, torch.Tensor]]:
        saved.clear()
        for t in range(ROUNDS):
            if ahead:
                host.expect(range(6))
            for k in range(6):
                host.answer(Work(k, t))
            if saves:
                saved.update(host.take_changed())
        return saved | states(host)

    parts = assemble_tiny(method, models=models, momentum=0.9, rounds=ROUNDS, clients=6)
    expected = copy.deepcopy(work(make_host(parts, load=saved.get), ahead=False))
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 2)
    host = make_host(parts, load=saved.get)
    assert alike(work(host, ahead=True), expected)
    host.close()


def test_clients_that_are_no_longer_expected_are_dropped():
    host = make_host(assemble_tiny("fedgh", models="cnn-16-32", clients=4))
    host.expect([0, 1])
    host.expect([2])
    assert host._starts._ahead.keys() == {2}
    assert host.client(2).card.id == 2
    assert not host._starts._ahead
    host.close()


def test_drawn_weights_are_aligned_like_tensors_of_their_own():
    """Kernels of a GPU read four numbers at once, and fail elsewhere."""
    host = make_host(assemble_tiny("fedgh", models="cnn-16-32", clients=2))
    host.expect([0, 1])
    places = [value.data_ptr() for value in host._starts.model("cnn-16-32", 1, torch.device("cpu")).parameters()]
    assert {place % ALIGNMENT for place in places} == {places[0] % ALIGNMENT}
    host.close()


def test_a_place_of_its_architecture_is_worth_waiting_for(monkeypatch):
    """Another architecture's place would have to be given up, with everything that is recorded for it."""
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 2)
    host = make_host(assemble_tiny("fedgh", models="cnn-16-32,mlp-64", clients=4))
    assert host.seat(0) is not None
    assert host.seat(1, beside={0}) is not None
    assert host.seat(2, beside={0}) is None
    assert host.seat(3, beside={0}) is not None


def test_addresses_stay_when_another_client_comes(monkeypatch):
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 1)
    host = make_host(parts_of())

    def addresses(k: int) -> dict[str, int]:
        return {name: value.data_ptr() for name, value in host.client(k).tensors().items()}

    assert addresses(0) == addresses(1) == addresses(0)
    assert host.client(1).card.id == 1
    assert len(host.client(1).data["study"]) + len(host.client(1).data["quiz"]) == host.cards[1].samples


def test_there_is_no_place_beside_those_who_work(monkeypatch):
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 2)
    host = make_host(parts_of())
    assert host.seat(0) is not None
    assert host.seat(1, beside={0}) is not None
    assert host.seat(2, beside={0, 1}) is None
    assert host.seat(0, beside={0, 1}) is not None
    assert host.seat(2, beside={1}) is not None
    assert host.seat(0, beside={1, 2}) is None


@pytest.mark.parametrize("most", [1, 256])
def test_a_client_moves_to_another_site_and_back(most, monkeypatch):
    expected = alone()
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", most)
    parts = parts_of()
    sites = make_host(parts), make_host(parts)
    for t in range(ROUNDS):
        for k in range(4):
            here, there = sites if t % 2 else sites[::-1]
            if t and k % 2:
                there_state = there.release(k)
                assert there_state is not None
                here.adopt(k, there_state)
            (here if k % 2 else sites[0]).answer(Work(k, t))
    assert alike(states(*sites), expected)
    assert sites[0].release(0) is None, "what is saved need not travel"


def normed(shape: tuple[int, int, int]) -> nn.Module:
    """A backbone that normalizes single numbers."""
    channels, height, width = shape
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, 16), nn.BatchNorm1d(16))


@pytest.mark.parametrize(("beside", "smallest"), [("mlp-64", 2), ("test_host.normed", 8)])
def test_a_batch_is_large_enough_for_the_model_that_travels_too(beside, smallest, monkeypatch):
    """A last batch of two to seven is one of its own only where neither model normalizes single numbers."""
    looked = []
    monkeypatch.setattr(
        "pluribus.host.least_rows", lambda model, shape: looked.append(model) or batches.least_rows(model, shape)
    )
    parts = assemble_tiny("fml", models="mlp-64,cnn-16-32", aux_model=beside, clients=8, batch_size=10, epochs=1)
    host, sizes = make_host(parts), []
    for k in parts.cards:
        host.client(k).begin(0, 0, {})
        host.client(k).fit(lambda client, batch: sizes.append(batch.n))
    rows = [len(parts.data.sets(k)["train"]) for k in parts.cards]
    assert any(0 < n % 10 < 8 for n in rows)
    assert sum(sizes) == sum(rows)
    assert min(sizes) >= smallest
    assert (min(sizes) < 8) == (smallest == 2)
    assert len(looked) == 2 * 2  # two architectures, and what is beside them


def test_a_run_in_memory_saves_only_when_its_copies_take_too_much_memory(monkeypatch):
    """A checkpoint in memory would only be another copy."""
    saved = []

    def note(self, t, *state, commit=MemoryState.commit):
        saved.append(t)
        commit(self, t, *state)

    def run() -> pluribus.Result:
        saved.clear()
        return pluribus.run("fedgh", clients=6, rounds=4, workers=1, progress=False)

    monkeypatch.setattr(MemoryState, "commit", note)
    monkeypatch.setattr("pluribus.host.MOST_CLIENTS", 2)
    monkeypatch.setattr("pluribus.federation.MOST_PENDING", 3)
    roomy = run()
    assert saved == [3]
    monkeypatch.setattr("pluribus.host.AWAY_SHARE", 0)
    cramped = run()
    assert saved == [0, 1, 2, 3]
    for name, value in roomy.model(5).state_dict().items():
        assert torch.equal(cramped.model(5).state_dict()[name], value)
